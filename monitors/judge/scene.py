"""The scene of an incident as the judge sees it: plain values, each with the artefact and line it was read from.

A live server, a bundle and a recorded case all become a Scene, so one judge serves all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.blackbox import Snapshot
from monitors.engines import Dialect
from monitors.engines.dialect import NoticeKind


@dataclass(frozen=True)
class Cite:
    """Where something was read. ``line`` counts from 1; 0 when the artefact has no lines."""

    artefact: str
    line: int = 0


@dataclass(frozen=True)
class Missing:
    """Something that was not to be had, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int = 0
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Thread:
    """``frames`` run from the innermost outward. ``active`` and ``gil`` are py-spy's words."""

    name: str
    tid: int
    active: bool
    gil: bool
    frames: tuple[Frame, ...]
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Stack:
    """All threads of one process. ``who`` is a rank's number, or a name such as ``engine``; ``sample`` is empty for
    the first dump and names a later one (``t3``, ``native``)."""

    who: str
    title: str
    pid: int
    threads: tuple[Thread, ...]
    sample: str = ""

    @property
    def main(self) -> Thread | None:
        named = [thread for thread in self.threads if thread.name == "MainThread"]
        return (named or list(self.threads) or [None])[0]  # type: ignore[list-item]


SIMULATED = "simulated"  # the source of a reading that was derived from a black box, and of nothing else


@dataclass(frozen=True)
class Gpu:
    """Utilisations in percent. None: not read. ``source`` is ``nvml``, ``nvidia-smi``, ``simulated`` or empty."""

    node: str
    index: int
    util: float | None
    mem_util: float | None
    power_w: float | None
    limit_w: float | None
    source: str = ""
    cite: Cite = Cite("")

    @property
    def spinning(self) -> bool:
        """Busy by utilisation and far below its power cap: a kernel waits for something. Needs a power reading."""
        return (
            self.util is not None
            and self.util >= 95
            and self.power_w is not None
            and bool(self.limit_w)
            and self.power_w < 0.55 * (self.limit_w or 0)
        )

    @property
    def idle(self) -> bool:
        return self.util is not None and self.util <= 5


@dataclass(frozen=True)
class Process:
    """A row of the process table. ``state`` is the kernel's letter (R, S, D, T, Z), ``gone`` when it has ended."""

    pid: int
    ppid: int
    state: str
    title: str
    cpu_percent: float | None = None
    node: str = ""
    rank: int | None = None
    wchan: str = ""
    cite: Cite = Cite("")


@dataclass(frozen=True)
class BatchLine:
    """``progress`` is false for a line that a timer printed with nothing done (vLLM's all-zero line)."""

    kind: str
    stamp: str
    running: float
    waiting: float
    pending: float | None
    progress: bool
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Notice:
    """A line with a meaning of its own. ``fields`` are the pattern's groups; ``invocation`` where a journal knows it."""

    kind: NoticeKind
    text: str
    fields: Mapping[str, str]
    invocation: str = ""
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Traceback:
    """``kind`` and ``message`` are empty when the text was cut before the exception's own line."""

    text: str
    kind: str
    message: str
    invocation: str = ""
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Log:
    """One log in order. ``after`` counts lines after the last batch line with progress."""

    artefact: str
    batches: tuple[BatchLine, ...] = ()
    notices: tuple[Notice, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    starts: tuple[str, ...] = ()  # invocations in order of appearance
    lines: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Health:
    route: str
    status: int  # 0: no answer
    seconds: float
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Clock:
    """A node's clocks when its boxes were copied."""

    mono_ns: int
    unix_ns: int = 0


@dataclass(frozen=True)
class Scene:
    """Everything known. ``boxes`` by rank; ``clocks`` by rank too: those of its node when the box was copied."""

    dialect: Dialect
    boxes: Mapping[int, Snapshot] = field(default_factory=dict)
    box_cites: Mapping[int, Cite] = field(default_factory=dict)
    clocks: Mapping[int, Clock] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[Process, ...] = ()
    logs: tuple[Log, ...] = ()
    health: tuple[Health, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()
    stalled_s: float | None = None  # set by the monitor that saw the stall; None when only the files speak
    ended: bool = False  # the monitor saw a rank's process end
    ends: int = 0  # how many invocations it saw end so, one after another

    def notices(self, kind: NoticeKind) -> list[Notice]:
        return [notice for log in self.logs for notice in log.notices if notice.kind == kind]
