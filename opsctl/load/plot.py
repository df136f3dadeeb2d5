"""Drawings of results as SVG, by hand: throughput, first token and inter-token times over the streams of a sweep.

The style stands in each file, for light and dark. PNG is made where matplotlib is installed (it is no dependency).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from opsctl.load.figures import Spread, short
from opsctl.load.results import Results
from opsctl.load.summary import METRICS

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 76, 150, 40, 46
_DASHES = ("", "7 4", "2 3")
_LINE = 14.0
_LONGEST = 110  # characters of a line under the title
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.legend{font-size:10px}.title{font-size:15px;font-weight:600}"
    ".grid{stroke:#8884;stroke-width:1}"
    ".curve{fill:none;stroke-width:2}.band{stroke:none;opacity:.16}"
    ".c0{stroke:#0b6e99;fill:#0b6e99}.c1{stroke:#c2571a;fill:#c2571a}.c2{stroke:#5b7f2b;fill:#5b7f2b}.c3{stroke:#8a4fa3;fill:#8a4fa3}"
    ".curve.c0,.curve.c1,.curve.c2,.curve.c3{fill:none}text.c0,text.c1,text.c2,text.c3{stroke:none}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)
_CHARTS = {
    "throughput": (("tokens_per_s",), "Throughput"),
    "first-token": (("first_token_s.p50", "first_token_s.p99"), "Time to first token"),
    "inter-token": (("gap_s.p50", "gap_s.p90", "gap_s.p99"), "Inter-token latency"),
}


@dataclass(frozen=True)
class Curve:
    """``points``: (streams or requests a second, median with spread), in the order of the axis. ``colour``: by number, one of
    its own where none is given; ``dash``: 0 for a whole line."""

    name: str
    points: tuple[tuple[float, Spread], ...]
    colour: int | None = None
    dash: int = 0


def curves(results: Results, metrics: Sequence[str]) -> tuple[Curve, ...]:
    """One for each side and metric that was measured; in the unit that people read. Of several sides each has a colour, and
    each metric its dashes."""
    found = []
    several = len(results.sides) > 1
    for at, side in enumerate(results.sides):
        for dash, metric in enumerate(metrics):
            cells = sorted(results.of(side.name).values(), key=lambda cell: cell.rate or cell.streams)
            points = tuple(
                (cell.rate or float(cell.streams), spread.times(METRICS[metric].scale)) for cell in cells if (spread := cell.spread(metric))
            )
            which = METRICS[metric].words.split()[-1] if len(metrics) > 1 else ""  # p50, p99
            who = side.name if several or not which else ""
            name = f"{who} {which}".strip()
            if points:
                found.append(Curve(name, points, at, dash) if several else Curve(name, points))
    return tuple(found)


def write(results: Results, folder: Path, stem: str) -> tuple[Path, ...]:
    """One drawing a chart that has anything to show. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    across = "requests a second" if any(cell.rate for cell in results.cells) else "streams"
    for name, (metrics, title) in _CHARTS.items():
        drawn = curves(results, metrics)
        if drawn:
            path = folder / f"{stem}-{name}.svg"
            drawing = chart(drawn, f"{title} ({METRICS[metrics[0]].unit})", across, _legend(results))
            path.write_bytes(drawing.encode(errors="backslashreplace"))
            made += [path, *_png(drawn, title, across, path.with_suffix(".png"))]
    return tuple(made)


def _legend(results: Results) -> tuple[str, ...]:
    """Who was asked, from what machine, when."""
    who = (f"{side.name}: {side.model} at {side.url}{f', {side.command}' if side.command else ''}"[:_LONGEST] for side in results.sides)
    return (*who, f"asked from {results.host.name} ({results.host.cores} cores), {results.begun_utc}")


def chart(drawn: Sequence[Curve], title: str, across: str, legend: Sequence[str] = ()) -> str:
    """Medians as a line, least to most of the repetitions as a band. The streams' axis is logarithmic: it doubles."""
    xs = sorted({x for curve in drawn for x, _ in curve.points})
    step = _step(max(spread.most for curve in drawn for _, spread in curve.points))
    top, head = 4 * step, _TOP + 11 * len(legend)
    low, high = math.log(xs[0]), math.log(xs[-1])

    def x(value: float) -> float:
        share = 0.5 if high == low else (math.log(value) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - head - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
        *(f'<text class="legend" x="{_LEFT}" y="{32 + 11 * at}">{escape(line)}</text>' for at, line in enumerate(legend)),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>',
    ]
    for value in (step * count for count in range(5)):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in xs:
        parts.append(f'<text x="{x(value):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    ends: list[tuple[float, float, str, str]] = []
    for number, curve in enumerate(drawn):
        kind, points = f"c{(number if curve.colour is None else curve.colour) % 4}", curve.points
        dashes = f' stroke-dasharray="{_DASHES[curve.dash % len(_DASHES)]}"' if curve.dash else ""
        around = [(at, spread.most) for at, spread in points] + [(at, spread.least) for at, spread in reversed(points)]
        parts.append(f'<polygon class="band {kind}" points="{" ".join(f"{x(at):.1f},{y(v):.1f}" for at, v in around)}"/>')
        parts.append(f'<polyline class="curve {kind}"{dashes} points="{" ".join(f"{x(at):.1f},{y(s.median):.1f}" for at, s in points)}"/>')
        for at, spread in points:
            said = f"<title>{at:g}: {escape(str(spread))}</title>"
            parts.append(f'<circle class="{kind}" cx="{x(at):.1f}" cy="{y(spread.median):.1f}" r="3">{said}</circle>')
        at, last = points[-1]
        ends.append((y(last.median) + 4, x(at) + 10, kind, curve.name))
    below = 0.0
    for height, left, kind, name in sorted(ends):
        below = max(height, below + _LINE)  # names that would lie on each other stand below each other
        parts.append(f'<text class="{kind}" x="{left:.1f}" y="{below:.1f}">{escape(name)}</text>')
    return "".join([*parts, "</svg>\n"])


def _step(most: float) -> float:
    """A round quarter of an axis that holds ``most``: 1, 1.5, 2, 2.5, 4 or 5 times a power of ten."""
    least = (most or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(least))
    return next(one * power for one in (1.0, 1.5, 2.0, 2.5, 4.0, 5.0, 10.0) if one * power >= least * 0.999)


def _png(drawn: Sequence[Curve], title: str, across: str, path: Path) -> tuple[Path, ...]:
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.5))
    except ImportError:
        return ()
    axes = figure.subplots()
    for curve in drawn:
        xs, medians = [at for at, _ in curve.points], [spread.median for _, spread in curve.points]
        axes.plot(xs, medians, marker="o", label=curve.name)
        axes.fill_between(xs, [s.least for _, s in curve.points], [s.most for _, s in curve.points], alpha=0.16)
    axes.set(title=title, xlabel=across, xscale="log", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
    return (path,)
