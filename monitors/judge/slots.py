"""Slots that leak: requests that a batch line counts as on their way between servers and that never arrive.

Batches go on, so nothing stalls; the count stands still, fewer and fewer requests run, and throughput sinks over hours.
Pure: one batch line after another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from monitors.judge.scene import BatchLine

_ON_THEIR_WAY = re.compile(r"transfer|inflight|infight|prealloc|bootstrap")
_STANDS_S = 600.0
_LINES = 20
_SUNK = 0.5  # of the most that ran at once


@dataclass(frozen=True)
class Count:
    value: float
    since_s: float
    lines: int = 1


@dataclass(frozen=True)
class Slots:
    """What is kept between lines. Begin with ``Slots()``."""

    counts: Mapping[str, Count] = field(default_factory=dict)
    running: float = 0.0
    most: float = 0.0

    def take(self, line: BatchLine, now_s: float) -> Slots:
        """After one more batch line. Only lines with progress count: without it this is a stall."""
        if not line.progress:
            return self
        counts = {}
        for key, value in line.values.items():
            if value > 0 and _ON_THEIR_WAY.search(key):
                before = self.counts.get(key)
                same = before is not None and before.value == value
                counts[key] = Count(value, before.since_s, before.lines + 1) if before is not None and same else Count(value, now_s)
        # The most that ran fades, so that a quiet night is not held against the morning.
        return Slots(counts, line.running, max(line.running, self.most * 0.999))

    def stuck(self, now_s: float) -> str:
        """What leaks, in words; empty when nothing does."""
        if self.running > _SUNK * self.most:
            return ""
        for key, count in self.counts.items():
            lasted_s = now_s - count.since_s
            if lasted_s >= _STANDS_S and count.lines >= _LINES:
                text = f"{key} stands at {count.value:.0f} for {lasted_s:.0f} s while batches go on; {self.running:.0f} run"
                return f"{text}, where {self.most:.0f} did"
        return ""
