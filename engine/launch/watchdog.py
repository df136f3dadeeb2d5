"""When is a rank stuck? Decided from black boxes alone, so that a frozen rank cannot freeze the decision.

Two things are watched. A rank that writes nothing is stuck by itself. Work that lies while every rank is alive and
beats is stuck too: requests that could be batched (a grammar that compiles is not in the way) and nothing that only
work moves has moved on any rank. A long queue that moves, a long forward pass and a long compilation are neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from engine.blackbox import Phase, Snapshot

_LONGEST_LOOK_S = 5.0  # a launcher that was itself held up has not seen that work lay


@dataclass(frozen=True)
class Stuck:
    rank: int
    still_s: float
    phase: Phase


@dataclass(frozen=True)
class Lying:
    """How long batchable work has lain without progress, as far as it was looked at. Begin with ``Lying()``.

    Time without such work neither counts nor clears: clients that give up and try again do not hide a scheduler that
    takes none of it."""

    moved: Hashable = None
    looked_ns: int = 0
    held: bool = False
    lain_s: float = 0.0

    def look(self, boxes: Mapping[int, Snapshot], now_mono_ns: int) -> Lying:
        """After one more look."""
        held = any(_batchable(box) > 0 for box in boxes.values() if box.header.tp == 0)
        moved = tuple(
            (rank, box.host.step, box.host.progress_ns, box.device.begun, box.device.ended, box.device.layer, box.device.completed)
            for rank, box in sorted(boxes.items())
        )
        if moved != self.moved:
            return Lying(moved, now_mono_ns, held)
        spent_s = min((now_mono_ns - self.looked_ns) / 1e9, _LONGEST_LOOK_S) if held and self.held else 0.0
        return Lying(moved, now_mono_ns, held, self.lain_s + spent_s)


def stuck_rank(boxes: Mapping[int, Snapshot], now_mono_ns: int, timeout_s: float) -> Stuck | None:
    """The rank that has not moved for longest, if that is more than ``timeout_s``.

    A rank moves when either of its threads writes its record. One that holds nothing and waits for work beats several
    times a second; one that stopped beating is stuck too.
    """
    worst: Stuck | None = None
    for rank, box in boxes.items():
        still_s = box.age_s(now_mono_ns)
        if still_s > timeout_s and (worst is None or still_s > worst.still_s):
            worst = Stuck(rank, still_s, box.host.phase)
    return worst


def unfresh(boxes: Mapping[int, Snapshot], now_mono_ns: int, age_s: float) -> list[int]:
    """Ranks whose record is older than ``age_s``."""
    return [rank for rank, box in boxes.items() if box.age_s(now_mono_ns) > age_s]


def _batchable(box: Snapshot) -> int:
    """Requests that a scheduler holds and that wait for nothing but its decision."""
    return box.host.held - box.host.counters["grammar_waiting"]
