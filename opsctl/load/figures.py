"""Figures: percentiles, medians with their spread, and how sure a count makes one of a rate. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959963984540054


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, interpolated. Raises ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True)
class Spread:
    """A median and the least and the most of ``count`` repetitions."""

    median: float
    least: float
    most: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def times(self, scale: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * scale, self.least * scale, self.most * scale, self.count)

    def __str__(self) -> str:
        if self.count == 1:
            return short(self.median)
        return f"{short(self.median)} [{short(self.least)}..{short(self.most)}]"


def short(value: float) -> str:
    """Three figures that count."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a rate of which ``hits`` of ``of`` trials were seen (Wilson 1927): it holds for small counts
    and at 0 and 1, where the plain interval has no width. Raises ValueError for impossible counts."""
    if of <= 0 or not 0 <= hits <= of:
        raise ValueError(f"{hits} of {of} is no count")
    share, square = hits / of, _Z95 * _Z95
    centre = (share + square / (2 * of)) / (1 + square / of)
    half = _Z95 / (1 + square / of) * math.sqrt(share * (1 - share) / of + square / (4 * of * of))
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == of else centre + half)
