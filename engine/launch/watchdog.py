"""When is a rank stuck? Decided from black boxes alone, so that a frozen rank cannot freeze the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.blackbox import Phase, Snapshot


@dataclass(frozen=True)
class Stuck:
    rank: int
    still_s: float
    phase: Phase


def stuck_rank(boxes: Mapping[int, Snapshot], now_mono_ns: int, timeout_s: float) -> Stuck | None:
    """The rank that has held work and not moved for longest, if that is more than ``timeout_s``.

    A rank moves when either of its threads writes its record, or when a batch gives a result. A rank that holds
    nothing and waits for work beats several times a second; one that stopped beating is stuck too.
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
