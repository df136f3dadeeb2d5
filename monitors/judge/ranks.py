"""One view of each rank, joined from its stack, its black box and its row in the process table.

The black box is believed before the stack (it speaks of the device, a stack only of Python), and a stopped process
before both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from engine.blackbox import DeviceState, Phase, Snapshot
from monitors.judge.scene import Cite, Process, Scene, Stack
from monitors.judge.stands import ELSEWHERE, WAITING, Stand, Standing, stand_of

_FRONT = frozenset({"api", "apiserver", "server", "frontend", "router", "tokenizer", "detokenizer", "parent", "launcher"})
_HOST_PHASES = frozenset({Phase.schedule, Phase.grammar, Phase.launch, Phase.results})


@dataclass(frozen=True)
class RankView:
    """``main`` is where the main thread stands, ``stream`` where the most telling other thread stands, ``standing``
    the conclusion. ``still`` is None without a second sample."""

    who: str
    standing: Standing
    text: str
    cite: Cite
    main: Stand | None = None
    stream: Stand | None = None
    box: Snapshot | None = None
    process: Process | None = None
    still: bool | None = None
    stopped: bool = False
    gone: bool = False
    pid: int = 0

    @staticmethod
    def named(rank: int) -> RankView:
        """A rank of which only its number is known."""
        return RankView(str(rank), Standing.unknown, "told by another's record only", Cite(""))

    def name(self) -> str:
        if not self.who.isdigit():
            return f"process {self.who}" + (f" (pid {self.pid})" if self.pid else "")
        notes = [f"pid {self.process.pid}"] if self.process else [f"pid {self.box.header.pid}"] if self.box else []
        if self.process and self.process.node:
            notes.append(f"node {self.process.node}")
        return f"rank {self.who}" + (f" ({', '.join(notes)})" if notes else "")


def views(scene: Scene) -> tuple[RankView, ...]:
    """The ranks in order. A process that is no rank (an engine core, an API server) has no view, unless no rank has
    one: then what computes in one process is that process."""
    by_rank = {stack.who: stack for stack in scene.stacks if not stack.sample and stack.who.isdigit()}
    processes = {str(p.rank): p for p in scene.processes if p.rank is not None}
    known = sorted({*by_rank, *map(str, scene.boxes), *processes}, key=int)
    if not by_rank and not scene.boxes:
        alone = {s.who: s for s in scene.stacks if not s.sample and not s.who.isdigit() and not _is_front(s.who)}
        return tuple(_view(scene, who, stack, None, None) for who, stack in alone.items()) or tuple(
            _view(scene, who, None, None, processes[who]) for who in known
        )
    return tuple(_view(scene, who, by_rank.get(who), scene.boxes.get(int(who)), processes.get(who)) for who in known)


def _is_front(who: str) -> bool:
    """``api``, or ``api_`` and the node that it runs on."""
    return who.lower() in _FRONT or who.lower().partition("_")[0] in _FRONT


def _view(scene: Scene, who: str, stack: Stack | None, box: Snapshot | None, process: Process | None) -> RankView:
    main = stand_of(stack.main, scene.dialect) if stack and stack.main else None
    pid = stack.pid if stack else 0
    stream = _stream(scene, stack)
    native = next((s for s in scene.stacks if s.who == who and s.sample == "native"), None)
    stream = _stream(scene, native) or stream if stream is None else stream
    standing, text, cite = _conclude(scene, who, main, stream, box)
    state = process.state if process else ""
    if state in ("T", "t"):
        assert process is not None
        text, cite = f"process {process.pid} is stopped (state T)", process.cite
    stopped, gone = state in ("T", "t"), state in ("gone", "Z", "X")
    return RankView(who, standing, text, cite, main, stream, box, process, _still(scene, who, stack), stopped, gone, pid)


def _stream(scene: Scene, stack: Stack | None) -> Stand | None:
    """The most telling thread beside the main one: a callback before a collective; all else is housekeeping."""
    if stack is None:
        return None
    found = [stand_of(thread, scene.dialect) for thread in stack.threads if thread is not stack.main]
    for wanted in (Standing.host_callback, Standing.collective):
        for stand in found:
            if stand.standing is wanted:
                return stand
    return None


def _conclude(scene: Scene, who: str, main: Stand | None, stream: Stand | None, box: Snapshot | None) -> tuple[Standing, str, Cite]:
    """Standing, words and citation of a rank, by the best source there is."""
    if stream and stream.standing is Standing.host_callback:
        return stream.standing, f"a stream thread is in a host callback: {stream.where}", stream.cite
    at_barrier = main is not None and main.standing is Standing.grammar_barrier
    if at_barrier and (box is None or box.device.state is DeviceState.collective):
        assert main is not None
        return main.standing, f"{main.standing}: {main.where}", main.cite
    if box is not None:
        cite = scene.box_cites.get(int(who), Cite(f"rank-{who}.box"))
        device, phase = box.device, box.host.phase
        text = f"phase {phase.name}, device {device.state.name}, collectives {device.enqueued} enqueued and {device.completed} completed"
        if device.state is DeviceState.collective:
            return Standing.collective, text, cite
        if phase in (Phase.recv, Phase.idle):
            return (Standing.receive if phase is Phase.recv else Standing.idle), text, cite
        if device.state is DeviceState.compute or phase in _HOST_PHASES:
            return Standing.host, text, cite
        if phase is Phase.wait_device:
            return Standing.device_wait, text, cite
    if main is not None:
        return main.standing, f"{main.standing}: {main.where}", main.cite
    return Standing.unknown, "neither a stack nor a black box", Cite("")


def _still(scene: Scene, who: str, first: Stack | None) -> bool | None:
    """Whether the main thread stands on the same lines in every later sample; None without one."""
    later = [s for s in scene.stacks if s.who == who and s.sample and s.sample != "native" and s.main]
    if first is None or first.main is None or not later:
        return None
    lines = [(f.function, f.line) for f in first.main.frames]
    return all([(f.function, f.line) for f in s.main.frames] == lines for s in later if s.main)


def odd_ones(ranks: Sequence[RankView]) -> tuple[RankView, ...]:
    """The ranks that do not stand where the majority waits; without such a majority those that do not wait in a
    collective or on the device while others do; else those that work while others are at rest."""
    groups = Counter(place(rank) for rank in ranks)
    if len(groups) < 2:
        return ()
    first, most = groups.most_common(1)[0]
    scene = next(rank for rank in ranks if place(rank) == first)
    if most > len(ranks) / 2 and scene.standing in WAITING:
        return tuple(rank for rank in ranks if place(rank) != first)
    outside = tuple(rank for rank in ranks if rank.standing not in WAITING)
    if outside and len(outside) < len(ranks):
        return outside
    busy = tuple(rank for rank in ranks if rank.standing not in ELSEWHERE)
    if len(busy) < len(ranks):
        return busy
    return tuple(ranks) if scene.standing in WAITING else ()


def place(rank: RankView) -> tuple[str, Hashable]:
    """Ranks with one place stand together. Two collectives, told apart by the code that calls them, are two places;
    where a black box speaks, the wait on the device and the collective that the device is in are one."""
    if rank.stream and rank.stream.standing is Standing.collective:
        return "waiting", rank.stream.site
    if rank.standing in WAITING and rank.box is not None:
        return "waiting", ()
    if rank.standing is Standing.collective and rank.main:
        return "waiting", rank.main.site
    return rank.standing.name, ()


def grouped(ranks: Sequence[RankView]) -> tuple[tuple[str, tuple[RankView, ...]], ...]:
    """The ranks by where they stand, largest group first; each with the words of its first rank."""
    groups: dict[tuple[str, Hashable], list[RankView]] = {}
    for rank in ranks:
        groups.setdefault(place(rank), []).append(rank)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return tuple((members[0].text, tuple(members)) for members in ordered)


def told(ranks: Sequence[RankView]) -> str:
    """The groups in one phrase: the majority's place is the scene, who stands elsewhere is named."""
    parts = []
    for text, members in grouped(ranks):
        names = ", ".join(member.who for member in members[:8]) + (", ..." if len(members) > 8 else "")
        parts.append(f"{len(members)} of {len(ranks)} (rank{'s' if len(members) > 1 else ''} {names}): {text}")
    return "; ".join(parts)
