"""From facts to pages. The templates hold the words, ``facts`` the values, ``svg`` the drawings."""

from __future__ import annotations

import datetime as dt
import functools
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from monitors.capture import manifest
from monitors.capture.manifest import utc
from monitors.judge.scene import Cite
from monitors.judge.verdict import Evidence
from monitors.report import svg
from monitors.report.facts import Facts, read

_BEFORE_S = 8.0  # of the time before the last progress that the drawings show
HTML, TEXT = "report.html", "report.md"


def write(folder: Path) -> Path:
    """Put ``report.html`` and ``report.md`` into a finished bundle, listed in its manifest. Returns the page's path."""
    begun = utc()
    facts = read(folder)
    manifest.append(folder, HTML, _page(facts).encode(), probe="report", start=begun)
    manifest.append(folder, TEXT, _text("report.md.jinja", facts).encode(), probe="report", start=begun)
    return folder / HTML


def page(folder: Path) -> str:
    """One self-contained HTML page: no script, no font, no request to anywhere."""
    return _page(read(folder))


def markdown(folder: Path) -> str:
    """The report for a ticket."""
    return _text("report.md.jinja", read(folder))


def incident(folder: Path) -> str:
    """A draft of the incident's text, every number with the artefact it was read from."""
    return _text("incident.md.jinja", read(folder))


def upstream(folder: Path) -> str:
    """A draft of a bug report for the engine's own project: what was seen, without anybody's words or addresses."""
    return _text("upstream.md.jinja", read(folder))


def _page(facts: Facts) -> str:
    declared = svg_declared(facts)
    axis = svg.Axis(*window(facts, declared))
    line = facts.line
    drawings = {
        "timeline": (svg.timeline(line, axis, declared, anchor)),
        "steps": (svg.chart(line.steps, axis, line, declared, anchor, unit="/s", height=130)) if line.steps else None,
        "gpus": [
            (name, util.source, anchor(util.cite),
             (svg.chart([util], axis, line, declared, anchor, unit="%", height=96, ceiling=100.0, area=True)),
             (svg.chart([power], axis, line, declared, anchor, unit="W", height=96, ceiling=power.limit, area=True)))
            for name, util, power in line.gpus
        ],
    }  # fmt: skip
    phases = sorted({phase for row in facts.rows for phase, share in row.shares.items() if share > 0.0005 or phase == row.phase})
    return _environment(html=True).get_template("report.html.jinja").render(
        f=facts, drawings=drawings, phases=phases, declared=svg.clock(declared), last=_last(facts), quiet=_quiet(facts, declared),
    )  # fmt: skip


def _text(template: str, facts: Facts) -> str:
    declared = svg_declared(facts)
    text = _environment(html=False).get_template(template).render(
        f=facts, declared=svg.clock(declared), last=_last(facts), quiet=_quiet(facts, declared), last_progress=_last_progress(facts),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def svg_declared(facts: Facts) -> float:
    return dt.datetime.fromisoformat(facts.manifest["created_utc"].replace("Z", "+00:00")).timestamp()


def window(facts: Facts, declared: float) -> tuple[float, float]:
    """From some time before the last progress to the end of the capture."""
    last = facts.line.last_progress_s
    begin = (last if last is not None and declared - last < 900 else declared) - _BEFORE_S
    return begin, max(facts.line.end_s, declared) + 0.3


def _last(facts: Facts) -> str:
    return svg.clock(facts.line.last_progress_s) if facts.line.last_progress_s else ""


def _last_progress(facts: Facts) -> tuple[str, str]:
    """When it was, in UTC, and where that stands: the black boxes know it, the monitor only to within one of its looks."""
    at = facts.line.last_progress_s
    if at:
        return dt.datetime.fromtimestamp(at, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"), "rank-*.box"
    return str(facts.progress.get("last_progress_utc") or ""), "progress.json"


def _quiet(facts: Facts, declared: float) -> str:
    if facts.line.last_progress_s:
        return f"{declared - facts.line.last_progress_s:.1f}"
    return f"{facts.progress['stalled_s']:.1f}" if facts.progress.get("stalled_s") is not None else ""


def anchor(cite: Cite) -> str:
    """The place in the page where an artefact's line is shown."""
    return f"#{_slug(cite.artefact)}" + (f"-{cite.line}" if cite.line else "")


def _slug(name: str) -> str:
    return "a-" + re.sub(r"[^A-Za-z0-9]+", "-", name)


@functools.cache
def _environment(*, html: bool) -> jinja2.Environment:
    def loaded(name: str) -> str:
        return (resources.files("monitors.report") / name).read_text(encoding="utf-8")

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(loaded), autoescape=html, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = {"anchor": anchor, "slug": _slug, "cite": _cite, "breathe": _breathe, "told": _told}
    made.filters.update(filters)
    return made


def _told(item: Evidence) -> str:
    """Evidence as an item of a Markdown list; what has more than one line (a traceback) is fenced, so that it stays as it is."""
    first, _, rest = item.text.partition("\n")
    said = f"{first} [`{_cite(item.cite)}`]"
    if not rest:
        return said
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", rest)), default=0))
    return "\n".join([said, "", f"  {fence}text", *(f"  {line}".rstrip() for line in rest.splitlines()), f"  {fence}"])


def _cite(cite: Cite) -> str:
    return f"{cite.artefact}:{cite.line}" if cite.line else cite.artefact


def _breathe(name: str) -> str:
    return name.replace("_", " ")
