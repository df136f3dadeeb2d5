"""How long held work may lie before it is called a stall: from the source of progress, the server's own times, and what
else is seen of the devices.

A silence means more the finer the source is. A black box moves with every layer and every collective, a counter of
steps with every step, a log line every 40 steps or 10 s. So each source has its floor, the server's own past raises it,
signs of standing shorten it, signs of work lengthen it, and the watchdog's time is a ceiling above all: evidence must
be taken before the server is killed.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from monitors.engines import Dialect


class Source(enum.StrEnum):
    """What tells of progress, the finest that there is."""

    boxes = "boxes"  # black boxes: every layer, every collective
    steps = "steps"  # a counter that each step moves
    lines = "lines"  # batch lines, or counters that move when a request ends


_FLOOR_S = {Source.boxes: 4.0, Source.steps: 10.0, Source.lines: 30.0}
_LOOK_S = {Source.boxes: 0.5, Source.steps: 3.0, Source.lines: 3.0}  # how late a look may see the last progress, and the stall
_LINES_MISSED = 3.0  # so many intervals between two signs of progress
_SILENCE_AGAIN = 1.5  # a silence that ended by itself may come again, and somewhat longer
_SHORTENED = 0.5
_UNWATCHED_S = 300.0  # the watchdog's time where the server has none
_GAPS_NEEDED = 8
USUAL_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Signs:
    """What is seen beside progress; all False where nothing is known.

    ``parked``: a black box says that a device is in a collective, or that every rank waits for work.
    ``spinning``: a GPU is busy by utilisation, in no band of its own work, with hardly any memory traffic.
    ``working``: every GPU that is busy draws what it draws at work.
    ``computing``: a process of the engine uses the CPU as a compiler does, and no GPU spins.
    """

    parked: bool = False
    spinning: bool = False
    working: bool = False
    computing: bool = False


NO_SIGNS = Signs()


@dataclass(frozen=True)
class Limits:
    """``stall_s``: a fixed stall time; None: it is found as this module says. ``watchdog_s``: the server's own watchdog,
    0 without one. ``slow_factor``: how many times its own past a step must take to be called slow."""

    stall_s: float | None = None
    watchdog_s: float = _UNWATCHED_S
    slow_factor: float = 3.0

    @property
    def ceiling_s(self) -> float:
        """The longest wait: half of the watchdog's time is left for the evidence."""
        return (self.watchdog_s or _UNWATCHED_S) / 2


def floor_s(source: Source) -> float:
    """No silence shorter than this is a stall."""
    return _FLOOR_S[source]


def patience_s(limits: Limits, source: Source, signs: Signs = NO_SIGNS, gaps: Sequence[float] = (), silences: Sequence[float] = (),
               lag_s: float = 0.0) -> float:  # fmt: skip
    """Seconds of silence that are a stall.

    Args:
        gaps: the latest times between two signs of progress while work was held [s].
        silences: longer ones that ended by themselves of late [s].
        lag_s: for so long after the last work a server's gauges may say that something is held. A GPU that spins
            speaks sooner.
    """
    if limits.stall_s is not None:
        return limits.stall_s
    floor = _FLOOR_S[source]
    usual = statistics.quantiles(gaps, n=20)[-1] if len(gaps) >= _GAPS_NEEDED else USUAL_INTERVAL_S if source is Source.lines else 0.0
    wait = max(floor, _LINES_MISSED * usual, _SILENCE_AGAIN * max(silences, default=0.0))
    if signs.parked or signs.spinning:
        wait = max(floor * _SHORTENED if source is not Source.boxes else floor, wait * _SHORTENED)
    elif source is not Source.boxes and (signs.working or signs.computing):
        wait = max(wait, limits.ceiling_s)
    if lag_s and not signs.spinning:
        wait = max(wait, lag_s + _LOOK_S[source])
    return min(wait, limits.ceiling_s)


def bound_s(limits: Limits, source: Source, interval_s: float = USUAL_INTERVAL_S, lag_s: float = 0.0) -> float:
    """How long after the last progress a wedge is declared at the latest, when the server's signs of progress come
    every ``interval_s``, up to half as much later, and nothing tells that work goes on. ``doctor`` prints it."""
    gaps = [1.5 * interval_s] * _GAPS_NEEDED if source is Source.lines else ()
    return patience_s(limits, source, gaps=gaps, lag_s=lag_s) + _LOOK_S[source]


def bounds(dialect: Dialect, limits: Limits, interval_s: float = USUAL_INTERVAL_S) -> dict[Source, float]:
    """``bound_s`` for each source that an engine can have, the finest first. ``interval_s`` is that of its log lines: 40
    decode steps, or a statistics timer's."""
    sources = [Source.boxes] if dialect.black_box else [Source.steps, Source.lines] if dialect.metrics.steps else [Source.lines]
    lag_s = 0.0 if dialect.black_box else dialect.metrics.lag_s
    return {source: bound_s(limits, source, interval_s, lag_s) for source in sources}
