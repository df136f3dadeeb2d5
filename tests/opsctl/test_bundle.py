"""``opsctl bundle`` and ``opsctl incident`` on a bundle of real ranks."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monitors import casefolder
from monitors.capture import archive, bundle
from opsctl.cli import main
from opsctl.runbooks.run import RunRecord, StepRecord
from tests.monitors.cluster import HEALTHY, Cluster, small_fleet, web


def opsctl(*words: str) -> tuple[int, Any]:
    out = io.StringIO()
    code = main([*words, "--json"], {}, stdout=out, stderr=io.StringIO())
    return int(code), json.loads(out.getvalue())["data"]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taken")
    with web(HEALTHY) as server, Cluster(folder) as cluster:
        cluster.wedge("grammar")
        seen = {"stalled_s": 5.0, "held": 2.0, "state": "stalled", "last_progress_utc": "2026-01-01T00:00:00.000Z"}
        return bundle.capture(small_fleet(cluster, server.url).one(), root=folder / "bundles", budget_s=20.0, progress=seen).folder


def test_a_bundle_is_packed_verified_extracted_and_a_changed_one_is_found(taken: Path, tmp_path: Path) -> None:
    packed = archive.pack(taken, tmp_path / "b.tar.zst")
    assert opsctl("bundle", "verify", str(packed))[0] == 0
    code, data = opsctl("bundle", "extract", str(packed), "--into", str(tmp_path))
    assert code == 0 and data["ok"]
    again = Path(data["folder"])
    (again / "ps.txt").write_text("forged\n")
    assert opsctl("bundle", "verify", str(again))[0] == 9
    code, found = opsctl("bundle", "diff", str(taken), str(again))
    assert code == 0 and found == []
    assert opsctl("bundle", "verify", str(tmp_path / "none"))[0] == 2


def test_a_manifest_says_clocks_tools_and_digests(taken: Path) -> None:
    _, data = opsctl("bundle", "show", str(taken))
    assert data["clocks"]["a"]["within_s"] > 0 and abs(data["clocks"]["a"]["offset_s"]) <= data["clocks"]["a"]["within_s"]
    assert data["tools"]["a"]["py_spy"].startswith("py-spy") and data["end"] >= data["start"]
    assert set(data["config_digests"]) == {"0", "1", "2"}


def test_the_engine_is_the_one_that_the_capture_was_told_whatever_the_log_sounds_like(taken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(taken, folder)
    for box in folder.glob("rank-*.box"):
        box.unlink()
    (folder / "server.log").write_text(
        "[2026-03-02 10:00:05 TP0] Decode batch, #running-req: 2, #token: 9, gen throughput (token/s): 5.0\n"
    )
    assert casefolder.detect([folder / "server.log"]).name == "sglang"
    assert casefolder.read(folder).dialect.name == "lastbatch"


def test_the_report_is_one_page_that_asks_nothing_of_any_network(taken: Path, tmp_path: Path) -> None:
    from monitors import report

    folder = tmp_path / "copy"
    shutil.copytree(taken, folder)
    text = report.write(folder).read_text()
    assert bundle.verify(folder).ok
    assert "<script" not in text and not re.findall(r'(?:src|href)="(?:https?:)?//', text) and "@import" not in text and "url(" not in text
    anchors = set(re.findall(r'id="([^"]+)"', text))
    cited = set(re.findall(r'class="cite"><a href="#([^"]+)"', text))
    assert cited and {name for name in cited if name.startswith(("a-rank", "a-progress"))} <= anchors
    assert "hang_grammar_barrier" in text and text.count("<svg") >= 2 + 2 * 3


def test_every_number_of_the_drafts_is_read_from_the_artefact_that_it_cites(taken: Path) -> None:
    code, data = opsctl("incident", "report", str(taken))
    assert code == 0
    lines = [line for line in data["incident"].splitlines() if line.startswith("- ") and "[`" in line]
    assert lines
    for line in lines:
        artefact = re.findall(r"\[`([^`:]+)", line)[-1]
        assert (taken / artefact).is_file(), line
    assert re.search(r"^At 2\S+Z \[`rank-\*\.box`\] .* with 2 requests held \[`progress.json`\]", data["incident"], re.M)
    assert "| TODO | service restored" in data["incident"] and "127.0.0.1" not in data["upstream"]


def test_the_draft_says_what_a_runbook_did_and_when_its_confirmation_passed(taken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(taken, folder)

    def step(name: str, outcome: str, utc: str, section: str = "Restore service") -> StepRecord:
        return StepRecord(name, section, "opsctl ...", outcome, began_utc=utc, seconds=4.25, approved_by="ana")

    steps = [step("restart", "passed", "2026-01-01T00:01:00Z"), step("no-overlap", "skipped", "2026-01-01T00:01:10Z"),
             step("confirm", "failed", "2026-01-01T00:01:20Z", "Confirm"),
             step("confirm", "passed", "2026-01-01T00:02:00Z", "Confirm")]  # fmt: skip
    record = RunRecord("r1", "hang_grammar_barrier", "flash", "ana", "2026-01-01T00:00:50Z", steps=steps)
    (folder / "runbook-r1.json").write_bytes(msgspec.json.encode(record))
    _, data = opsctl("incident", "report", str(folder))
    draft = data["incident"]
    assert "- 2026-01-01T00:01:00Z hang_grammar_barrier, step restart: passed after 4.2 s, approved by ana [`runbook-r1.json`]" in draft
    assert "| 2026-01-01T00:02:04Z | service restored" in draft and "no-overlap" not in draft
    (folder / "runbook-r1.json").write_bytes(msgspec.json.encode(RunRecord("r1", "x", "flash", "ana", "", steps=steps[:3])))
    assert "| TODO | service restored" in opsctl("incident", "report", str(folder))[1]["incident"]


def test_a_manifest_of_another_form_is_told_by_every_command_that_reads_it(tmp_path: Path) -> None:
    row = {"path": "a", "node": "", "rank": None, "probe": "log", "start": "", "end": "", "outcome": "failed", "reason": "", "sha256": ""}
    head = {"schema": "lastbatch.bundle/1", "verdict": None, "created_utc": "2026-01-01T00:00:00.000Z"}
    for odd in (
        {"items": 5},
        {"items": [5]},
        {"items": [{**row, "path": 5}]},
        {"items": [{"path": "a"}]},
        {"items": [row], "created_utc": "soon"},
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({**head, **odd}))
        for words in (("bundle", "verify"), ("bundle", "show"), ("bundle", "pack"), ("incident", "report")):
            assert opsctl(*words, str(tmp_path))[0] == 2, (odd, words)
    (tmp_path / "manifest.json").write_text(json.dumps({**head, "items": [row]}))
    assert opsctl("bundle", "verify", str(tmp_path))[0] == 0


def test_an_archive_that_is_not_whole_leaves_nothing_that_stands_in_the_way_of_another_try(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("manifest.json", b"{}"), ("noise", os.urandom(1 << 20))):
        (tmp_path / "b" / name).write_bytes(content)
    packed = archive.pack(tmp_path / "b", tmp_path / "b.tar.zst")
    (tmp_path / "cut.tar.zst").write_bytes(packed.read_bytes()[:-100_000])
    (tmp_path / "into").mkdir()
    assert opsctl("bundle", "extract", str(tmp_path / "cut.tar.zst"), "--into", str(tmp_path / "into"))[0] == 2
    assert not list((tmp_path / "into").iterdir())
    assert archive.unpack(packed, tmp_path / "into") == tmp_path / "into" / "b"
    assert opsctl("bundle", "extract", str(tmp_path / "none.tar.zst"))[0] == 2
