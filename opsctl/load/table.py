"""Results as tables: of one run, of two sides pair by pair, of two runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opsctl.load.figures import Spread
from opsctl.load.results import Cell, Results
from opsctl.load.summary import METRICS

_SHOWN = ("tokens_per_s", "requests_per_s", "first_token_s.p50", "first_token_s.p99", "gap_s.p50", "gap_s.p90", "gap_s.p99", "seconds.p50")


@dataclass(frozen=True)
class Ratio:
    """One metric at one level. ``ratio`` is second by first: repetition by repetition where they were taken in pairs,
    else of the medians alone. ``apart``: the spreads of the two do not touch."""

    level: str
    metric: str
    first: Spread
    second: Spread
    ratio: Spread
    apart: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
            found.append(Ratio(level, metric, a, b, ratio, a.most < b.least or b.most < a.least))
    return tuple(found)


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
    """``second/first``; a star where the spreads do not touch."""
    rows = [["streams", "", first, second, f"{second}/{first}", ""]]
    for one in found:
        if one.metric in _SHOWN:
            metric, star = METRICS[one.metric], "*" if one.apart else ""
            shown = [str(spread.times(metric.scale)) for spread in (one.first, one.second)]
            rows.append([one.level, f"{metric.words} ({metric.unit})", *shown, str(one.ratio), star])
    return "\n".join([*_grid(rows), "", "* the spreads of the repetitions do not touch"])


def _cell(spread: Spread | None, metric: str) -> str:
    return "-" if spread is None else str(spread.times(METRICS[metric].scale))


def _grid(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
