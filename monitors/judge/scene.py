"""The scene of an incident as the judge sees it: plain values, each with the artefact and line it was read from.

A live server, a bundle and a recorded case all become a Scene, so one judge serves all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.blackbox import Snapshot
from monitors.engines import Dialect
from monitors.engines.dialect import NoticeKind
from monitors.judge.moment import Moment


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
_BUSY_PERCENT = 95
_WAITS_BELOW_MEMORY = 15  # percent of memory utilisation: a wait reads next to nothing
_WAITS_BELOW = 0.55  # of the power cap: a kernel that spins draws less than one that works
_WORKS_ABOVE = 0.7
_WAITS_BELOW_W, _WORKS_ABOVE_W = 30.0, 200.0  # where no cap is known: what no part does at work, what none does in a spin


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
    def hot(self) -> bool:
        """Busy by utilisation, which a kernel that spins is too."""
        return self.util is not None and self.util >= _BUSY_PERCENT

    @property
    def spinning(self) -> bool:
        """Busy by utilisation and far below its power cap: a kernel waits for something. Needs a power reading;
        absolute watts are the fallback where no cap is known."""
        if not self.hot or self.power_w is None or (self.mem_util or 0) > _WAITS_BELOW_MEMORY:
            return False
        return self.power_w < (_WAITS_BELOW * self.limit_w if self.limit_w else _WAITS_BELOW_W)

    @property
    def working(self) -> bool:
        """Busy by utilisation and near its power cap: whatever is slow, it computes."""
        if not self.hot or self.power_w is None:
            return False
        return self.power_w > (_WORKS_ABOVE * self.limit_w if self.limit_w else _WORKS_ABOVE_W)

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
    """``progress`` is false for a line that a timer printed with nothing done (vLLM's all-zero line). ``values`` are
    the line's numbers by key; ``who`` tells engines and ranks of one log apart."""

    kind: str
    stamp: str
    running: float
    waiting: float
    pending: float | None
    progress: bool
    cite: Cite = Cite("")
    moment: Moment | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    who: str = ""


@dataclass(frozen=True)
class Notice:
    """A line with a meaning of its own. ``fields`` are the pattern's groups; ``invocation`` where a journal knows it."""

    kind: NoticeKind
    text: str
    fields: Mapping[str, str]
    invocation: str = ""
    cite: Cite = Cite("")
    moment: Moment | None = None


@dataclass(frozen=True)
class Access:
    """A line of an access log. For a streamed answer it is written when the headers go out: it is no progress."""

    method: str
    route: str
    status: int
    cite: Cite = Cite("")
    moment: Moment | None = None


@dataclass(frozen=True)
class Repeat:
    """The same words again and again at the end of a log. ``per_s`` is None where the lines carry no time."""

    text: str
    count: int
    per_s: float | None
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
    """One log in order of time. ``role`` is what its name says of its server (prefill, decode, proxy) or empty."""

    artefact: str
    batches: tuple[BatchLine, ...] = ()
    notices: tuple[Notice, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    starts: tuple[str, ...] = ()  # invocations in order of appearance
    lines: int = 0
    skipped: int = 0
    accesses: tuple[Access, ...] = ()
    repeat: Repeat | None = None
    last: Moment | None = None  # the time of the last line that has one
    role: str = ""


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
class Enqueued:
    """What one rank says of the collectives of one group: a flight recorder, RAS or a watchdog's line. ``seq`` and
    ``op`` are of the one it stands in (or the last), ``size`` as text; counts are None where not told."""

    rank: int
    seq: int
    op: str = ""
    size: str = ""
    state: str = ""  # scheduled | started | completed, empty when not told
    completed: int | None = None
    group: str = ""
    source: str = ""  # recorder | ras | watchdog
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Answer:
    """What one request was answered with: texts by channel (``content``, ``reasoning``, ``arguments``), joined over
    the chunks of a stream, each with the line of its first chunk."""

    texts: Mapping[str, str]
    lines: Mapping[str, int]
    tool_calls: int = 0
    finish: str = ""
    model: str = ""
    fingerprint: str = ""
    tokens: int | None = None
    ended: bool = True  # false for a stream that stops without its last word
    cite: Cite = Cite("")


@dataclass(frozen=True)
class Client:
    """A line in which a client, a proxy or a smoke test says how its requests fared."""

    what: str  # timeout | ok | fallback
    text: str
    cite: Cite = Cite("")
    moment: Moment | None = None


@dataclass(frozen=True)
class Unit:
    """A service as its manager shows it (``systemctl show``, a pod's status), by key."""

    values: Mapping[str, str]
    cites: Mapping[str, Cite]


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
    canary: tuple[int, int] = (0, 0)  # answers to the seeded canary under load: how many were wrong, of how many
    slots: str = ""  # what it saw leak over time, in words
    markup: str = ""  # how many answers held markup by the engine's own counters, in words
    metrics_before: Mapping[str, float] = field(default_factory=dict)  # an earlier sample of the same page
    enqueued: tuple[Enqueued, ...] = ()
    answers: tuple[Answer, ...] = ()
    clients: tuple[Client, ...] = ()
    units: tuple[Unit, ...] = ()

    def notices(self, kind: NoticeKind) -> list[Notice]:
        return [notice for log in self.logs for notice in log.notices if notice.kind == kind]
