"""What each GPU draws idle, in decode and in prefill, learned from quiet running; and what a reading means beside it.

Utilisation cannot tell a kernel that works from one that spins, absolute watts differ from model to model, and a spin
on one part draws what work draws on another. So each GPU is compared with itself. Absolute watts stand in only until
enough has been learned. Pure: the daemon keeps the bands on disk.

What it cannot see: which kernel runs, and a spin that draws power and moves memory as work does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_KEPT = 200  # readings of each kind
_NEEDED = 24
_MARGIN_SHARE = 0.06
_MARGIN_W = 3.0
_HOT_PERCENT = 95.0
_COLD_PERCENT = 5.0
_NO_TRAFFIC_PERCENT = 5.0
_UNLEARNED_SHARE = 0.55  # of the enforced limit; the fallback
_UNLEARNED_W = 100.0  # where no limit is known: below this a hot data-centre part does not work


class Load(enum.StrEnum):
    """What the server did while a reading was taken."""

    idle = "idle"
    decode = "decode"
    prefill = "prefill"


class Seen(enum.StrEnum):
    """What a reading looks like. ``unclear``: the readings that would tell are missing, or clocks are held down."""

    idle = "idle"
    working = "working"
    spinning = "spinning"
    unclear = "unclear"


@dataclass(frozen=True)
class Draw:
    """One reading of one GPU. ``key`` is its UUID, or node and index; None: not read. ``held_down``: its clocks are
    throttled by heat or a brake, so that its power tells nothing."""

    key: str
    util: float | None
    mem_util: float | None
    power_w: float | None
    limit_w: float | None = None
    held_down: bool = False


@dataclass(frozen=True)
class Band:
    """Between ``low_w`` and ``high_w`` lie all but the outermost readings, with a margin. ``traffic`` is the memory
    utilisation that all but the lowest readings reach, None where it was not read."""

    low_w: float
    high_w: float
    traffic: float | None
    count: int

    def holds(self, power_w: float) -> bool:
        return self.low_w <= power_w <= self.high_w


@dataclass(frozen=True)
class Bands:
    """What was learned: for each GPU and load the latest readings (power in W, memory utilisation in percent or None)."""

    kept: Mapping[str, Mapping[Load, tuple[tuple[float, float | None], ...]]] = field(default_factory=dict)

    def band(self, key: str, load: Load) -> Band | None:
        """None until enough readings are there."""
        readings = self.kept.get(key, {}).get(load, ())
        if len(readings) < _NEEDED:
            return None
        powers = sorted(power for power, _ in readings)
        aside = len(powers) // 50
        low, high = powers[aside], powers[-1 - aside]
        traffic = sorted(memory for _, memory in readings if memory is not None)
        margin = max(_MARGIN_W, _MARGIN_SHARE * high)
        return Band(low - margin, high + margin, traffic[len(traffic) // 20] if traffic else None, len(readings))

    def to_json(self) -> dict[str, Any]:
        return {
            key: {load.value: [list(pair) for pair in readings] for load, readings in loads.items()} for key, loads in self.kept.items()
        }

    @staticmethod
    def from_json(raw: Any) -> Bands:
        """Raises ValueError, KeyError, TypeError or AttributeError for what is no such document."""

        def readings(pairs: Any) -> tuple[tuple[float, float | None], ...]:
            return tuple((float(w), None if m is None else float(m)) for w, m in pairs)[-_KEPT:]

        return Bands({str(key): {Load(load): readings(pairs) for load, pairs in loads.items()} for key, loads in raw.items()})


def learn(bands: Bands, draws: Sequence[Draw], load: Load) -> Bands:
    """With readings of a quiet moment: nothing stalls, is slow or is suspected, and ``load`` is all that the server does."""
    kept = dict(bands.kept)
    for draw in draws:
        # An idle GPU may be hot (peers that spin in a broadcast between two prompts): that is its idle then. A working
        # one that is not busy at this instant says nothing about work.
        if draw.power_w is None or draw.held_down or (load is not Load.idle and (draw.util or 0.0) < _HOT_PERCENT / 2):
            continue
        loads = dict(kept.get(draw.key, {}))
        loads[load] = (*loads.get(load, ()), (draw.power_w, draw.mem_util))[-_KEPT:]
        kept[draw.key] = loads
    return Bands(kept)


def look(bands: Bands, draw: Draw) -> Seen:
    """What a reading looks like beside the GPU's own past."""
    if draw.util is None:
        return Seen.unclear
    if draw.util <= _COLD_PERCENT:
        return Seen.idle
    if draw.util < _HOT_PERCENT:
        return Seen.working
    still = draw.mem_util is not None and draw.mem_util < _NO_TRAFFIC_PERCENT
    if draw.power_w is None or draw.held_down:
        return Seen.spinning if still else Seen.unclear
    work = [band for load in (Load.decode, Load.prefill) if (band := bands.band(draw.key, load)) is not None]
    if not work:
        low = draw.power_w < (_UNLEARNED_SHARE * draw.limit_w if draw.limit_w else _UNLEARNED_W)
        return Seen.spinning if low and (still or draw.mem_util is None) else Seen.working if not low and not still else Seen.unclear
    inside = [band for band in work if band.holds(draw.power_w)]
    quieter = draw.mem_util is not None and any((band.traffic or 0.0) > 2 * max(draw.mem_util, 1.0) for band in inside)
    if inside and not (still and quieter):
        return Seen.working
    below = draw.power_w < min(band.low_w for band in work)
    if still or (draw.mem_util is None and below):
        return Seen.spinning
    between = min(band.low_w for band in work) <= draw.power_w <= max(band.high_w for band in work)
    return Seen.working if between else Seen.unclear


def all_seen(bands: Bands, draws: Sequence[Draw]) -> tuple[bool, bool]:
    """``(spinning, working)`` for a whole deployment: one GPU that spins is enough for the first; for the second one
    works and none spins."""
    seen = {look(bands, draw) for draw in draws}
    return Seen.spinning in seen, Seen.working in seen and Seen.spinning not in seen
