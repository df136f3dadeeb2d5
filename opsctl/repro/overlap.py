"""How much of the time the requests under suspicion truly decoded beside others. Pure.

Measured by the server's own black boxes where there are any (which requests shared a batch), else by when the parts of
the streams came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.blackbox import BatchKind, Event, EventKind, RequestFlag

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """``share`` of the probes' decoding; None when no probe decoded. ``of``: how much that was, in ``unit``."""

    share: float | None
    of: float
    unit: str  # seconds | batches
    source: str  # stream timings | black box


def by_streams(probes: Sequence[Interval], agents: Sequence[Interval], needed: int) -> Measured:
    """The share of the probes' time in which at least ``needed`` agents decoded."""
    whole = sum(end - begin for begin, end in probes)
    if whole <= 0:
        # Probes that took no time at all (refusals on a coarse clock) are counted as moments.
        inside = [sum(b <= begin <= e for b, e in agents) >= needed for begin, _ in probes]
        return Measured(sum(inside) / len(inside) if inside else None, 0.0, "seconds", "stream timings")
    edges = sorted({edge for interval in agents for edge in interval})
    covered = 0.0
    for begin, end in probes:
        cuts = [begin, *(edge for edge in edges if begin < edge < end), end]
        for left, right in itertools.pairwise(cuts):
            middle = (left + right) / 2
            if sum(b <= middle <= e for b, e in agents) >= needed:
                covered += right - left
    return Measured(covered / whole, whole, "seconds", "stream timings")


@dataclass
class Batches:
    """Decode and verify batches of one rank, read from its ring piece by piece. ``masked`` held a grammar-masked request,
    ``shared`` held enough others besides."""

    needed: int
    masked: int = 0
    shared: int = 0
    lost: bool = False  # the ring was overwritten between two reads
    _next: int = 0
    _open: tuple[int, int] | None = field(default=None)  # (grammar, others) of the batch whose requests are being read

    def skip(self, events: Sequence[Event]) -> None:
        """These were before the run: they are not counted."""
        if events:
            self._next = events[-1].n + 1

    def take(self, events: Iterable[Event]) -> None:
        """Events in their order; those that were read before are skipped."""
        fresh = [event for event in events if event.n >= self._next]
        if fresh and self._next and fresh[0].n > self._next:
            self.lost = True
            self._open = None
        for event in fresh:
            if event.kind is EventKind.batch_begin:
                self._close()
                self._open = (0, 0) if event.sub in (BatchKind.decode, BatchKind.verify) else None
            elif event.kind is EventKind.batch_request and self._open is not None:
                grammar, others = self._open
                masked = bool(event.flags & RequestFlag.grammar)
                self._open = (grammar + masked, others + (not masked))
            elif event.kind is EventKind.batch_end:
                self._close()
        if fresh:
            self._next = fresh[-1].n + 1

    def _close(self) -> None:
        if self._open is not None and self._open[0]:
            self.masked += 1
            self.shared += self._open[1] >= self.needed
        self._open = None

    def measured(self) -> Measured:
        self._close()
        return Measured(self.shared / self.masked if self.masked else None, float(self.masked), "batches", "black box")
