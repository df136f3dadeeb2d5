"""Loading, idle, busy, slow or stalled? A pure state machine over samples and the clock that they carry.

A stall is: work is held and nothing has progressed for ``stall_s``. Progress is any change of what only work changes:
a result of a batch, the layer that a forward pass has reached, a stream's begun or ended step, a collective, a counter
of tokens, a batch line. Loading and idle never stall, and a gap in the looking (a monitor that was itself paused, a
node that did not answer) is not silence.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from engine.blackbox import COUNTERS, Phase, Snapshot

_LONGEST_LOOK_S = 5.0  # what one interval between two samples may add to a silence
_PACES_KEPT = 240
_PACES_NEEDED = 30
_PACES_RECENT = 5
# Counters that only work moves. A request that was received or refused is none of it.
_WORK = tuple(
    name
    for name in COUNTERS
    if name.startswith(("batches_", "executed_", "generated_", "cached_"))
    or name in ("requests_finished", "prompt_tokens", "grammar_compiles", "grammar_failures", "retractions")
)


class State(enum.StrEnum):
    unknown = "unknown"
    loading = "loading"
    idle = "idle"
    busy = "busy"
    slow = "slow"
    stalled = "stalled"
    ended = "ended"  # a rank's process has gone without an ordered shutdown


@dataclass(frozen=True)
class Limits:
    """``slow_factor``: how many times its own past a step must take to be called slow."""

    stall_s: float = 45.0
    slow_factor: float = 3.0

    @property
    def suspect_s(self) -> float:
        """After this silence a light sample is kept."""
        return self.stall_s / 2


@dataclass(frozen=True)
class Sample:
    """One look. ``held`` is None when nothing says whether work is held; ``work`` changes when and only when there is
    progress; ``steps`` counts steps of the leading rank, None where that is not known."""

    mono_s: float
    held: float | None
    work: Hashable
    invocation: str = ""
    loading: bool = False
    ended: bool = False
    steps: int | None = None


@dataclass(frozen=True)
class Judgement:
    """``quiet_s`` is how long held work has not progressed; ``since_s`` when the state began."""

    state: State
    since_s: float
    quiet_s: float
    held: float
    changed: bool
    suspicious: bool = False


@dataclass(frozen=True)
class Memory:
    """What the machine keeps between two samples. Begin with ``Memory()``."""

    state: State = State.unknown
    since_s: float = 0.0
    seen_s: float | None = None
    quiet_s: float = 0.0
    work: Hashable = None
    invocation: str = ""
    step: tuple[int, float] | None = None  # the last step seen to end, and when
    paces: tuple[float, ...] = ()  # seconds a step, newest last


def advance(memory: Memory, sample: Sample, limits: Limits) -> tuple[Memory, Judgement]:
    """The state after one more sample."""
    fresh = memory.seen_s is None or sample.invocation != memory.invocation
    gap = 0.0 if fresh or memory.seen_s is None else min(sample.mono_s - memory.seen_s, _LONGEST_LOOK_S)
    held = sample.held or 0.0
    paces, step = (memory.paces, None) if fresh else (memory.paces, memory.step)
    if sample.ended:
        state, quiet = State.ended, 0.0
    elif sample.loading:
        state, quiet = State.loading, 0.0
    elif sample.held is None:
        state, quiet = State.unknown, memory.quiet_s
    elif held <= 0:
        state, quiet, step = State.idle, 0.0, None
    else:
        moved = fresh or sample.work != memory.work or memory.state in (State.idle, State.loading, State.ended)
        quiet = 0.0 if moved else memory.quiet_s + gap
        paces, step = _pace(paces, step, sample)
        state = State.stalled if quiet >= limits.stall_s else State.slow if _slow(paces, limits) else State.busy
    changed = state is not memory.state
    since = sample.mono_s if changed else memory.since_s
    # A sample that says nothing must not count as change: what was known before it is kept for the next.
    work = memory.work if state is State.unknown and not fresh else sample.work
    after = Memory(state, since, sample.mono_s, quiet, work, sample.invocation, step, paces)
    suspicious = limits.suspect_s <= quiet < limits.stall_s and state in (State.busy, State.slow)
    return after, Judgement(state, since, quiet, held, changed, suspicious)


def _pace(paces: tuple[float, ...], last: tuple[int, float] | None, sample: Sample) -> tuple[tuple[float, ...], tuple[int, float] | None]:
    """Seconds a step, measured from step to step however many samples lie between."""
    if sample.steps is None:
        return paces, None
    if last is None or sample.steps < last[0]:
        return paces, (sample.steps, sample.mono_s)
    if sample.steps == last[0]:
        return paces, last
    each = (sample.mono_s - last[1]) / (sample.steps - last[0])
    return (*paces, each)[-_PACES_KEPT:], (sample.steps, sample.mono_s)


def _slow(paces: tuple[float, ...], limits: Limits) -> bool:
    if len(paces) < _PACES_NEEDED:
        return False
    usual = statistics.median(paces[:-_PACES_RECENT])
    return statistics.median(paces[-_PACES_RECENT:]) > limits.slow_factor * usual > 0


def from_boxes(mono_s: float, boxes: Mapping[int, Snapshot], *, ended: bool, all_answered: bool = True) -> Sample:
    """A sample from the black boxes of all ranks, at the monitor's clock ``mono_s``. A rank without a box is loading,
    unless its node did not answer (``all_answered`` is false): then the others speak for it."""
    if not boxes:
        return Sample(mono_s, None, None)
    # Followers keep a request's state until the next plan tells them that it left: only a leader knows what is held.
    leaders = [box for box in boxes.values() if box.header.tp == 0] or list(boxes.values())
    held = float(sum(max(box.host.held, box.host.running + box.host.waiting) for box in leaders))
    work = tuple(
        (rank, box.host.progress_ns, box.device.begun, box.device.ended, box.device.layer, box.device.enqueued, box.device.completed,
         tuple(box.host.counters[name] for name in _WORK))
        for rank, box in sorted(boxes.items())
    )  # fmt: skip
    world = max(box.header.world for box in boxes.values())
    loading = (all_answered and len(boxes) < world) or any(box.host.phase in (Phase.load, Phase.capture) for box in boxes.values())
    invocations = sorted({box.header.invocation_id or str(box.header.start_mono_ns) for box in boxes.values()})
    steps = max(box.host.step for box in leaders)
    return Sample(mono_s, held, work, "+".join(invocations), loading and not ended, ended, steps)


def from_signals(mono_s: float, *, held: float | None, work: Hashable, ended: bool = False) -> Sample:
    """A sample for an engine without black boxes: what metrics and log lines say together."""
    return Sample(mono_s, held, work, ended=ended)
