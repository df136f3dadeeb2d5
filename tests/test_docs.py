"""What the pages say and code can check: classes, stall times, fleet files, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monitors import engines, fleet
from monitors.judge.patience import Limits, Source, bounds
from monitors.judge.verdict import Class
from monitors.packaging import unit

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (ROOT / page).read_text().splitlines() if line.startswith("|")
    ]


def test_the_monitors_page_has_every_class_and_whether_it_pages() -> None:
    told = {row[0].strip("`"): row[1] for row in rows("docs/monitor.md") if len(row) == 3 and row[1] in ("yes", "no")}
    assert told == {one.value: "yes" if one.is_alarm else "no" for one in Class}


def test_the_monitors_page_has_the_stall_times_that_doctor_prints() -> None:
    sources = {"black boxes": Source.boxes, "a counter that each step moves": Source.steps}
    told = {
        (row[0].strip("`"), sources.get(row[1], Source.lines)): int(found[1])
        for row in rows("docs/monitor.md")
        if len(row) == 3 and (found := re.match(r"(\d+) s\b", row[2])) and row[0].strip("`") in engines.names()
    }
    limits = Limits(watchdog_s=300.0)
    assert told == {
        (name, source): int(f"{most:.0f}") for name in engines.names() for source, most in bounds(engines.load(name), limits).items()
    }


FLEETS = {
    f"{page}[{at}]": text
    for page in ("README.md", "docs/peers.md")
    for at, text in enumerate(re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))
}


@pytest.mark.parametrize("where", FLEETS)
def test_a_fleet_file_of_a_page_is_one(where: str) -> None:
    found = fleet.parse(FLEETS[where], where)
    assert "WatchdogSec=" in unit.text("/usr/local/bin/hang-monitor", "/etc/lastbatch/fleet.toml", found)


def test_the_peers_page_has_a_fleet_file_for_each() -> None:
    found = [one for where, text in FLEETS.items() if "peers" in where for one in fleet.parse(text, where).deployment.values()]
    assert {one.engine for one in found} == {"vllm", "sglang"}
    assert any(service.container for one in found for node in one.node for service in node.service)


def test_the_transcript_at_the_top_is_a_cut_of_the_whole_one() -> None:
    top, _, whole = (ROOT / "README.md").read_text().partition("<details>")
    lines = re.findall(r"^\[ +[\d.]+ s\] .+", top, re.M)
    assert len(lines) > 8
    for line in lines:
        assert line.split(" ...")[0] in whole, line


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
