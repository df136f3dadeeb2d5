"""Loading, idle, busy, slow or stalled? A pure state machine over samples and the clock that they carry.

A stall is: work is held and nothing has progressed for as long as ``patience.py`` allows. Progress is any change of what
only work changes: a result of a batch, the layer that a forward pass has reached, a stream's begun or ended step, a
collective, a counter of tokens, a batch line. Loading and idle never stall, and a gap in the looking (a monitor that was
itself paused, a node that did not answer) is not silence. A stall ends when work has moved twice, or is gone.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from engine.blackbox import COUNTERS, DeviceState, Phase, Snapshot
from monitors.judge.patience import NO_SIGNS, Limits, Signs, Source, floor_s, patience_s

__all__ = ["Judgement", "Limits", "Memory", "Sample", "Signs", "Source", "State", "advance", "from_boxes", "from_signals"]

_LONGEST_LOOK_S = 5.0  # what one interval between two samples may add to a silence
_PACES_KEPT = 240
_PACES_NEEDED = 30
_PACES_RECENT = 5
_GAPS_KEPT = 100
_SILENCES_KEPT = 20
_SILENCE_REMEMBERED_S = 3600.0
_SLOW_SETTLES = 0.7  # slow ends below this share of the factor that began it
_MOVES_TO_RECOVER = 2
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
class Sample:
    """One look. ``held`` is None when nothing says whether work is held; ``work`` changes when and only when there is
    progress; ``steps`` counts steps of the leading rank, None where that is not known; ``exact`` says that ``held`` is
    no gauge, ``lag_s`` by how much it may lag."""

    mono_s: float
    held: float | None
    work: Hashable
    invocation: str = ""
    loading: bool = False
    ended: bool = False
    steps: int | None = None
    source: Source = Source.lines
    signs: Signs = NO_SIGNS
    exact: bool = False
    lag_s: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """``quiet_s`` is how long held work has not progressed, ``stall_s`` how long it may; ``since_s`` when the state began."""

    state: State
    since_s: float
    quiet_s: float
    held: float
    changed: bool
    suspicious: bool = False
    stall_s: float = 0.0


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
    gaps: tuple[float, ...] = ()  # seconds between two moves of held work, newest last
    silences: tuple[tuple[float, float], ...] = ()  # long ones that ended: when, and how long
    moves: int = 0  # since the stall was declared


def advance(memory: Memory, sample: Sample, limits: Limits) -> tuple[Memory, Judgement]:
    """The state after one more sample."""
    fresh = memory.seen_s is None or sample.invocation != memory.invocation
    if fresh:
        # A server that was started again between two looks has not inherited its predecessor's stall.
        state = State.unknown if memory.state is State.stalled else memory.state
        memory = Memory(state, memory.since_s, invocation=sample.invocation)
    looked = 0.0 if memory.seen_s is None else min(sample.mono_s - memory.seen_s, _LONGEST_LOOK_S)
    held = sample.held or 0.0
    same = not fresh and sample.work == memory.work
    after = replace(memory, seen_s=sample.mono_s, work=sample.work)
    stall_s = limits.ceiling_s
    if sample.ended:
        after = replace(after, state=State.ended, quiet_s=0.0)
    elif sample.loading:
        after = replace(after, state=State.loading, quiet_s=0.0, moves=0)
    elif sample.held is None:
        # A sample that says nothing must not count as change: what was known before it is kept for the next.
        after = replace(after, state=State.unknown, work=sample.work if fresh else memory.work)
    elif held <= 0:
        # Where held is exact and nothing has moved, the work was given up, not done: what lay before it counts on.
        after = replace(after, state=State.idle, quiet_s=memory.quiet_s if same and sample.exact else 0.0, step=None, moves=0)
    else:
        after, stall_s = _holding(memory, after, sample, limits, same, looked)
    changed = after.state is not memory.state
    after = replace(after, since_s=sample.mono_s if changed else memory.since_s)
    quiet = after.quiet_s if after.state is not State.idle else 0.0
    suspicious = stall_s / 2 <= quiet < stall_s and after.state in (State.busy, State.slow)
    return after, Judgement(after.state, after.since_s, quiet, held, changed, suspicious, stall_s)


def _holding(memory: Memory, after: Memory, sample: Sample, limits: Limits, same: bool, looked: float) -> tuple[Memory, float]:
    """Work is held: the state, what was learned, and the stall time."""
    begins = memory.state in (State.idle, State.loading, State.ended) or memory.seen_s is None
    quiet = 0.0 if not same or (begins and not sample.exact) else memory.quiet_s + (0.0 if begins else looked)
    learned = _learn(after, memory.quiet_s + looked, sample) if not (same or begins or memory.state is State.unknown) else after
    paces, step = _pace(learned.paces, memory.step, sample)
    learned = replace(learned, quiet_s=quiet, paces=paces, step=step)
    recent = [length for end, length in learned.silences if sample.mono_s - end < _SILENCE_REMEMBERED_S]
    stall_s = patience_s(limits, sample.source, sample.signs, learned.gaps, recent, sample.lag_s)
    was_slow = memory.state is State.slow
    going = State.slow if _slow(paces, limits.slow_factor * (_SLOW_SETTLES if was_slow else 1.0)) else State.busy
    if memory.state is State.stalled:
        # The patience is not asked again: signs that come and go must not open and close a stall.
        moves = memory.moves + (not same)
        state = going if moves >= _MOVES_TO_RECOVER else State.stalled
        return replace(learned, state=state, moves=moves), stall_s
    return replace(learned, state=State.stalled if quiet >= stall_s else going, moves=0), stall_s


def _learn(memory: Memory, gap: float, sample: Sample) -> Memory:
    """After work has moved: the time since it last did, and, if that was long, that such a silence ended by itself."""
    silences = (*memory.silences, (sample.mono_s, gap)) if gap >= floor_s(sample.source) else memory.silences
    return replace(memory, gaps=(*memory.gaps, gap)[-_GAPS_KEPT:], silences=silences[-_SILENCES_KEPT:])


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


def _slow(paces: tuple[float, ...], factor: float) -> bool:
    if len(paces) < _PACES_NEEDED:
        return False
    usual = statistics.median(paces[:-_PACES_RECENT])
    return statistics.median(paces[-_PACES_RECENT:]) > factor * usual > 0


def from_boxes(mono_s: float, boxes: Mapping[int, Snapshot], *, ended: bool, all_answered: bool = True, ready: bool = True) -> Sample:
    """A sample from the black boxes of all ranks, at the monitor's clock ``mono_s``. A rank without a box is loading,
    unless its node did not answer (``all_answered`` is false): then the others speak for it. Until a launcher is
    ``ready``, ranks warm up: that is loading too, whatever their boxes hold."""
    if not boxes:
        return Sample(mono_s, None, None)
    # Followers keep a request's state until the next plan tells them that it left: only a leader knows what is held.
    leaders = [box for box in boxes.values() if box.header.tp == 0] or list(boxes.values())
    held = float(sum(max(box.host.held, box.host.running + box.host.waiting) for box in leaders))
    # A grammar that compiles has a deadline of its own, and moves nothing meanwhile: a leader that holds nothing else
    # is well as long as it beats.
    compiling = sum(box.host.counters["grammar_waiting"] for box in leaders)
    beats = sum(box.host.beats for box in leaders) if 0 < held <= compiling else 0
    work = (beats, *(
        (rank, box.host.progress_ns, box.device.begun, box.device.ended, box.device.layer, box.device.enqueued, box.device.completed,
         tuple(box.host.counters[name] for name in _WORK))
        for rank, box in sorted(boxes.items())
    ))  # fmt: skip
    world = max(box.header.world for box in boxes.values())
    loading = (
        not ready or (all_answered and len(boxes) < world) or any(box.host.phase in (Phase.load, Phase.capture) for box in boxes.values())
    )
    invocations = sorted({box.header.invocation_id or str(box.header.start_mono_ns) for box in boxes.values()})
    at_rest = all(box.host.phase in (Phase.recv, Phase.idle) and box.device.state is DeviceState.idle for box in boxes.values())
    parked = at_rest or any(box.device.state is DeviceState.collective for box in boxes.values())
    return Sample(
        mono_s, held, work, "+".join(invocations), loading and not ended, ended,
        max(box.host.step for box in leaders), Source.boxes, Signs(parked=parked), exact=True,
    )  # fmt: skip


def from_signals(mono_s: float, *, held: float | None, work: Hashable, ended: bool = False, loading: bool = False,
                 source: Source = Source.lines, signs: Signs = NO_SIGNS, lag_s: float = 0.0) -> Sample:  # fmt: skip
    """A sample for an engine without black boxes: what metrics, log lines and GPUs say together."""
    return Sample(mono_s, held, work, ended=ended, loading=loading, source=source, signs=signs, lag_s=lag_s)
