"""Results as tables: of one run, of two sides pair by pair, of two runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opsctl.load.figures import Spread
from opsctl.load.results import Cell, Results
from opsctl.load.summary import METRICS

_TELLING = 3  # repetitions
_SHOWN = ("tokens_per_s", "requests_per_s", "first_token_s.p50", "first_token_s.p99", "gap_s.p50", "gap_s.p90", "gap_s.p99", "seconds.p50")


@dataclass(frozen=True)
class Ratio:
    """One metric at one level. ``ratio`` is second by first: repetition by repetition where they were taken in pairs,
    else of the medians alone. ``apart``: the spreads of the two do not touch, and both are of enough repetitions to say so."""

    level: str
    metric: str
    first: Spread
    second: Spread
    ratio: Spread
    apart: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def apart(one: Spread, other: Spread) -> bool:
    """Whether they do not touch, and are of enough repetitions for that to say something."""
    return min(one.count, other.count) >= _TELLING and (one.most < other.least or other.most < one.least)


def ratios(first: dict[str, Cell], second: dict[str, Cell], *, paired: bool) -> tuple[Ratio, ...]:
    """Of the levels that both have."""
    found = []
    for level in [level for level in first if level in second]:
        for metric in METRICS:
            a, b = first[level].spread(metric), second[level].spread(metric)
            if a is None or b is None or a.median == 0:
                continue
            pairs = [
                y / x for one, two in zip(first[level].reps, second[level].reps, strict=False)
                if (x := one.value(metric)) and (y := two.value(metric)) is not None
            ]  # fmt: skip
            if not (paired and pairs):
                pairs = [b.median / a.median]
            ratio = Spread.of(pairs)
            found.append(Ratio(level, metric, a, b, ratio, apart(a, b)))
    return tuple(found)


def left_out(before: Results, after: Results) -> list[str]:
    """What a comparison of two files does not say: a second side, and levels that only one of them has."""
    notes = [
        f"of {when}, side {file.sides[0].name} is compared ({file.sides[0].url}); {', '.join(side.name for side in file.sides[1:])} is not"
        for when, file in (("before", before), ("after", after))
        if len(file.sides) > 1
    ]
    one, two = before.of(before.sides[0].name), after.of(after.sides[0].name)
    notes += [f"level {level} was not asked in both" for level in {**one, **two} if level not in one or level not in two]
    return notes


def of_run(results: Results) -> str:
    """One row a level; a median with the least and the most repetition."""
    lines = []
    for side in results.sides:
        head = ["streams", *(f"{METRICS[m].words} ({METRICS[m].unit})" for m in _SHOWN), "ok", "errors", "client CPU"]
        rows = []
        for cell in results.of(side.name).values():
            ok = sum(rep.ok for rep in cell.reps)
            wrong = ", ".join(f"{count} {kind}" for kind, count in cell.errors().items()) or "0"
            cpu = max(rep.client_cpu for rep in cell.reps)
            asked = sum(rep.asked for rep in cell.reps)
            rows.append([cell.level, *(_cell(cell.spread(m), m) for m in _SHOWN), f"{ok}/{asked}", wrong, f"{cpu:.0%}"])
        lines += [f"{side.name}: {side.model} at {side.url}" + (f", {side.command}" if side.command else ""), "", *_grid([head, *rows]), ""]
    return "\n".join([*lines, *(f"note: {note}" for note in results.notes)]).rstrip()


def of_ratios(found: Sequence[Ratio], first: str, second: str) -> str:
    """``second/first``; a star where the spreads do not touch, with how often chance alone would do that."""
    rows = [["streams", "", first, second, f"{second}/{first}", ""]]
    for one in found:
        if one.metric in _SHOWN:
            metric, star = METRICS[one.metric], "*" if one.apart else ""
            shown = [str(spread.times(metric.scale)) for spread in (one.first, one.second)]
            rows.append([one.level, f"{metric.words} ({metric.unit})", *shown, str(one.ratio), star])
    return "\n".join([*_grid(rows), "", _footnote(found)])


def _footnote(found: Sequence[Ratio]) -> str:
    least = min((min(one.first.count, one.second.count) for one in found), default=0)
    if least < _TELLING:
        return f"no row is marked: {least} repetition{'' if least == 1 else 's'} cannot tell a difference from chance ({_TELLING} can)"
    by_chance = 2 / math.comb(2 * least, least)  # of all orders of two alike samples, those in which one lies below the other
    return f"* the spreads of the repetitions do not touch; with {least} of them chance alone marks {by_chance:.1%} of the rows"


def _cell(spread: Spread | None, metric: str) -> str:
    return "-" if spread is None else str(spread.times(METRICS[metric].scale))


def _grid(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
