"""Figures of a run: pairs of measurements taken in turns, and their table."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """One row: repetition i of ``ours`` and of ``other`` were taken one after the other, so that a disturbance hits both."""

    part: str
    label: str
    unit: str
    ours_name: str
    ours: tuple[float, ...]
    other_name: str
    other: tuple[float, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.other):
            raise ValueError(f"{self.part}, {self.label}: {len(self.ours)} and {len(self.other)} repetitions are no pairs")

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours, self.other, strict=True))

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "ours_median": statistics.median(self.ours), "other_median": statistics.median(self.other),
                "ratio_median": statistics.median(self.ratios)}  # fmt: skip


def spread(values: Sequence[float], digits: int) -> str:
    """``median [min..max]``"""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


def digits_of(values: Sequence[float]) -> int:
    return 1 if max(values) >= 10 else 2


def table(pairs: Sequence[Pair]) -> str:
    """The rows of one part in Markdown, a table for each two sides: medians with the least and the greatest repetition, ratios
    repetition by repetition."""
    sides = itertools.groupby(pairs, lambda pair: (pair.ours_name, pair.other_name))
    return "\n\n".join(_table(list(group)) for _, group in sides)


def _table(pairs: Sequence[Pair]) -> str:
    head = ["", f"{pairs[0].ours_name}", f"{pairs[0].other_name}", "ratio", "unit"]
    rows = [head]
    for pair in pairs:
        digits = digits_of((*pair.ours, *pair.other))
        label = pair.label + (f" ({pair.note})" if pair.note else "")
        rows.append([label, spread(pair.ours, digits), spread(pair.other, digits), spread(pair.ratios, 2), pair.unit])
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
