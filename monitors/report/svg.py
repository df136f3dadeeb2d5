"""Drawings as SVG, by hand. Colours are classes: the page's style sheet knows light and dark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from html import escape

from monitors.judge.scene import Cite
from monitors.report.timeline import Curve, Timeline

WIDTH, LEFT, RIGHT = 1120, 118, 16
_ROW, _BAR = 30, 14
_MOST = 3000  # spans drawn in one lane: more only make the file large
Link = Callable[[Cite], str]


class Axis:
    """Unix seconds to pixels, with marks at round times in UTC."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, max(end_s, begin_s + 0.1)

    def x(self, unix_s: float) -> float:
        share = (unix_s - self.begin_s) / (self.end_s - self.begin_s)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def holds(self, unix_s: float) -> bool:
        return self.begin_s <= unix_s <= self.end_s

    def ticks(self) -> list[float]:
        length = self.end_s - self.begin_s
        step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600) if length / s <= 9), 7200.0)
        first = -(-self.begin_s // step) * step
        return [first + i * step for i in range(int((self.end_s - first) / step) + 1)]

    def grid(self, top: float, bottom: float, *, words: bool = True) -> str:
        parts = []
        for at in self.ticks():
            x = self.x(at)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            if words:
                parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{clock(at)}</text>')
        return "".join(parts)

    def rule(self, unix_s: float | None, top: float, bottom: float, text: str, kind: str) -> str:
        if unix_s is None or not self.holds(unix_s):
            return ""
        x = self.x(unix_s)
        word = f'<text class="rule-text {kind}" x="{x + 5:.1f}" y="{top + 3:.1f}">{escape(text)}</text>' if text else ""
        return f'<line class="rule {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>{word}'


def clock(unix_s: float) -> str:
    at = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    return at.strftime("%H:%M:%S") if abs(unix_s - round(unix_s)) < 0.05 else at.strftime("%H:%M:%S.%f")[:-5]


def timeline(line: Timeline, axis: Axis, declared_s: float, link: Link) -> str:
    top = 26
    height = top + len(line.lanes) * _ROW
    parts = [_open(height + 24, "Timeline of all clocks in UTC"), axis.grid(top - 4, height)]
    if line.last_progress_s is not None and axis.holds(line.last_progress_s):
        x1, x2 = axis.x(line.last_progress_s), axis.x(declared_s)
        parts.append(f'<rect class="silence" x="{x1:.1f}" y="{top - 4}" width="{max(0, x2 - x1):.1f}" height="{height - top + 4}"/>')
    for number, lane in enumerate(line.lanes):
        y = top + number * _ROW
        if number % 2:
            parts.append(f'<rect class="stripe" x="0" y="{y}" width="{WIDTH}" height="{_ROW}"/>')
        parts.append(f'<text class="lane" x="{LEFT - 10}" y="{y + _ROW / 2 + 4}" text-anchor="end">{escape(lane)}</text>')
        spans = [span for span in line.spans if span.lane == lane and span.end_s >= axis.begin_s][-_MOST:]
        for span in spans:
            x1, x2, title = axis.x(max(span.begin_s, axis.begin_s)), axis.x(span.end_s), _said(span.begin_s, span.text)
            parts.append(f'<a href="{link(span.cite)}"><rect class="span {span.kind}" x="{x1:.1f}" y="{y + (_ROW - _BAR) / 2}" '
                         f'width="{max(1.2, x2 - x1):.1f}" height="{_BAR}" rx="1.5"><title>{title}</title></rect></a>')  # fmt: skip
        for mark in line.marks:
            if mark.lane == lane and axis.holds(mark.unix_s):
                note = " (zone assumed)" if mark.assumed else ""
                x = axis.x(mark.unix_s)
                parts.append(f'<a href="{link(mark.cite)}"><circle class="mark {mark.kind}" cx="{x:.1f}" cy="{y + _ROW / 2}" r="4.5">'
                             f'<title>{_said(mark.unix_s, mark.text + note)}</title></circle></a>')  # fmt: skip
    parts.append(axis.rule(line.last_progress_s, top - 10, height, "last progress", "stop"))
    parts.append(axis.rule(declared_s, top - 10, height, "declared", "declared"))
    return "".join([*parts, "</svg>"])


def chart(curves: Sequence[Curve], axis: Axis, line: Timeline, declared_s: float, link: Link, *, unit: str, height: int = 120,
          ceiling: float | None = None, area: bool = False) -> str:  # fmt: skip
    """Curves over the timeline's axis. ``ceiling`` fixes the top of the scale; a curve's ``limit`` is drawn as a line."""
    top, bottom = 14, height - 22
    shown = [[(at, value) for at, value in curve.points if axis.holds(at)] for curve in curves]
    highest = ceiling or max((value for points in shown for _, value in points), default=1.0) * 1.1 or 1.0

    def y(value: float) -> float:
        return bottom - min(1.0, value / highest) * (bottom - top)

    parts = [_open(height, f"{unit} over time"), axis.grid(top, bottom)]
    for share in (0.0, 0.5, 1.0):
        value = share * highest
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f} {escape(unit)}</text>')
    for number, (curve, points) in enumerate(zip(curves, shown, strict=True)):
        if not points:
            continue
        path = " ".join(f"{axis.x(at):.1f},{y(value):.1f}" for at, value in points)
        if area:
            first, last = axis.x(points[0][0]), axis.x(points[-1][0])
            parts.append(f'<polygon class="area c{number % 8}" points="{first:.1f},{bottom} {path} {last:.1f},{bottom}"/>')
        if curve.limit is not None and curve.limit < highest:
            parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(curve.limit):.1f}" y2="{y(curve.limit):.1f}"/>')
        parts.append(
            f'<a href="{link(curve.cite)}"><polyline class="curve c{number % 8}"{_thick(number, len(curves))} points="{path}">'
            f"<title>{escape(curve.name)}: {escape(curve.source)}</title></polyline></a>"
        )
    parts.append(axis.rule(line.last_progress_s, top - 6, bottom, "", "stop"))
    parts.append(axis.rule(declared_s, top - 6, bottom, "", "declared"))
    return "".join([*parts, "</svg>"])


def _thick(number: int, of: int) -> str:
    """Curves that lie on each other are all seen: each is thinner than the one below it."""
    width = 1.8 + 1.6 * (of - 1 - number)
    return f' style="stroke-width:{min(width, 9.0):.1f}"' if of > 1 else ""


def _said(unix_s: float, text: str) -> str:
    return escape(f"{clock(unix_s)} {text}")


def _open(height: float, title: str) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
            'xmlns="http://www.w3.org/2000/svg" preserveAspectRatio="xMidYMid meet">')  # fmt: skip
