"""A dialect: how one engine speaks. Data in ``<engine>.toml``, read and checked here, used by observers and judge.

What every engine shares (frames of torch, NCCL and CUDA, lines of systemd and the kernel) is in ``libraries.toml``
and is appended to each dialect's own rules, so that a dialect's word goes first.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, get_args

Mark = Literal[
    "grammar", "collective", "device_wait", "receive", "reply", "idle", "read", "callback", "compile", "driver",
    "parse", "transfer", "step", "launch_callback", "barrier", "load", "sync",
]  # fmt: skip
NoticeKind = Literal[
    "ready", "loading", "watchdog", "health_failed", "crash", "traceback", "peer_wait", "rpc_timeout",
    "collective_timeout", "recorder", "restart", "exit", "killed", "memory",
    "desync", "enqueued", "retraction", "transfer_error", "grammar_error", "accepted", "finished", "compiling",
    "device_lost", "network", "probe_refused", "orderly", "no_memory_free", "fallback", "leak", "native_frames",
    "stopping", "started",
]  # fmt: skip
_SHARED = "libraries"


class DialectError(ValueError):
    """A dialect file cannot be used; the text names the file and the key."""


@dataclass(frozen=True)
class FrameRule:
    """What a stack frame means. ``function`` is searched in the function's bare name, ``file`` in the path."""

    mark: Mark
    function: re.Pattern[str]
    file: re.Pattern[str]


@dataclass(frozen=True)
class NoticeRule:
    kind: NoticeKind
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class LogGrammar:
    """Batch lines, in any of the forms ``line``.

    ``running``, ``waiting``, ``pending`` and ``throughput`` name keys of a line (or groups of the
    pattern) that are summed; with ``throughput`` a line shows progress only when that sum is above zero."""

    line: tuple[re.Pattern[str], ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    pending: tuple[str, ...]
    throughput: tuple[str, ...]


@dataclass(frozen=True)
class MetricNames:
    """``progress`` are counters that only work moves; of them ``steps`` move with every step (the others may move only
    when a request ends). ``accepted`` and ``answered`` count requests taken in and done with. ``lag_s``: the gauges may say
    for so long that something runs when nothing does."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    progress: tuple[str, ...]
    steps: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    lag_s: float = 0.0
    errors: tuple[str, ...] = ()  # counters of what should not happen: answers that failed
    leaks: tuple[str, ...] = ()  # of those, counters of markup that a client was given in an answer
    load: str = ""  # a route that says how many requests the API process has in hand


@dataclass(frozen=True)
class Refusal:
    """With ``flag`` set to ``value`` the engine answers requests of these shapes with this HTTP status."""

    flag: str
    value: str
    shapes: tuple[str, ...]
    status: int


@dataclass(frozen=True)
class AnswerRules:
    """``deciding``: the flags that can change what class of answer a request gets, by its shape, and those that can do so
    for any shape under ``any``; empty where that is not known."""

    deciding: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class ConfigRoutes:
    """Where a server tells its settings, tried in order; none for an engine that never does. ``optional``: a server may
    be started without the route, and then its arguments are all that can be known."""

    routes: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Dialect:
    """``rank_title`` has the groups dp, pp, tp and ep; ``member_title`` matches every process of the engine."""

    name: str
    watchdog_s: float
    rank_title: re.Pattern[str]
    member_title: re.Pattern[str]
    log: LogGrammar
    metrics: MetricNames
    health: dict[str, str]
    notices: tuple[NoticeRule, ...]
    frames: tuple[FrameRule, ...]
    black_box: bool = False
    words: re.Pattern[str] = re.compile(r"(?!)")  # what only this engine's artefacts say
    answers: AnswerRules = AnswerRules()
    config: ConfigRoutes = ConfigRoutes()

    def rank_of(self, title: str) -> int | None:
        """The tensor-parallel rank that a process title names; None for other processes. A worker without a
        coordinate in its title is the only one, rank 0."""
        found = self.rank_title.match(title)
        return int(found["tp"] or 0) if found else None

    def mark(self, function: str, file: str) -> Mark | None:
        """The mark of a frame. Newer Pythons give ``Class.method`` where older ones give ``method``: rules are
        written for the bare name."""
        bare = function.rsplit(".", 1)[-1]
        return next((rule.mark for rule in self.frames if rule.function.search(bare) and rule.file.search(file)), None)


@functools.cache
def names() -> tuple[str, ...]:
    """The engines that have a dialect."""
    found = (entry.name.removesuffix(".toml") for entry in resources.files("monitors.engines").iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name for name in found if name != _SHARED))


@functools.cache
def load(name: str) -> Dialect:
    """Raises DialectError when there is no such dialect, or its file is not right."""
    if name not in names():
        raise DialectError(f"{name}: no such dialect; known are {', '.join(names())}")
    own, shared = _raw(name), _raw(_SHARED)
    reader = _Reader(f"{name}.toml", own)
    return Dialect(
        name=reader.text("name"),
        watchdog_s=float(reader.value("watchdog_s")),
        rank_title=reader.pattern("titles.rank"),
        member_title=reader.pattern("titles.member"),
        log=LogGrammar(
            reader.patterns("log.line"),
            *(reader.words(f"log.{key}") for key in ("running", "waiting", "pending", "throughput")),
        ),
        metrics=MetricNames(
            running=reader.words("metrics.running"),
            waiting=reader.words("metrics.waiting"),
            progress=reader.words("metrics.progress"),
            steps=reader.words("metrics.steps"),
            accepted=reader.words("metrics.accepted"),
            answered=reader.words("metrics.answered"),
            lag_s=float(reader.value("metrics.lag_s", 0.0)),
            errors=reader.words("metrics.errors"),
            leaks=reader.words("metrics.leaks"),
            load=str(reader.value("metrics.load", "")),
        ),
        health={str(k): str(v) for k, v in own.get("health", {}).items()},
        notices=tuple(_Reader(file, raw).notice(i) for file, raw in ((f"{name}.toml", own), (f"{_SHARED}.toml", shared))
                      for i in range(len(raw.get("notice", ())))),
        frames=tuple(_Reader(file, raw).frame(i) for file, raw in ((f"{name}.toml", own), (f"{_SHARED}.toml", shared))
                     for i in range(len(raw.get("frame", ())))),
        black_box=bool(own.get("black_box", False)),
        words=reader.pattern("words"),
        answers=AnswerRules(
            {str(shape): frozenset(flags) for shape, flags in reader.value("answers.deciding", {}).items()},
            tuple(Refusal(str(one["flag"]), str(one["value"]), tuple(one["shapes"]), int(one["status"]))
                  for one in reader.value("answers.refused", [])),
        ),
        config=ConfigRoutes(reader.words("config.routes"), bool(reader.value("config.optional", False))),
    )  # fmt: skip


def _raw(name: str) -> dict[str, Any]:
    text = resources.files("monitors.engines").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DialectError(f"{name}.toml: {error}") from error


class _Reader:
    """Takes values out of one file and says file and key when one is missing or wrong."""

    def __init__(self, file: str, raw: dict[str, Any]) -> None:
        self.file, self.raw = file, raw

    def value(self, path: str, default: Any = None) -> Any:
        found: Any = self.raw
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None and default is None:
            raise DialectError(f"{self.file}: {path}: this key is needed")
        return default if found is None else found

    def text(self, path: str) -> str:
        return str(self.value(path))

    def words(self, path: str) -> tuple[str, ...]:
        return tuple(str(word) for word in self.value(path, []))

    def pattern(self, path: str) -> re.Pattern[str]:
        return self._compiled(path, self.text(path))

    def patterns(self, path: str) -> tuple[re.Pattern[str], ...]:
        """One pattern, or a list of them."""
        found = self.value(path)
        return tuple(self._compiled(path, str(text)) for text in (found if isinstance(found, list) else [found]))

    def frame(self, i: int) -> FrameRule:
        raw = self.raw["frame"][i]
        at = f"frame[{i}]"
        return FrameRule(
            self._choice(f"{at}.mark", raw.get("mark"), get_args(Mark)),
            self._compiled(f"{at}.function", raw.get("function", "")),
            self._compiled(f"{at}.file", raw.get("file", "")),
        )

    def notice(self, i: int) -> NoticeRule:
        raw = self.raw["notice"][i]
        at = f"notice[{i}]"
        return NoticeRule(
            self._choice(f"{at}.kind", raw.get("kind"), get_args(NoticeKind)), self._compiled(f"{at}.pattern", raw["pattern"])
        )

    def _choice(self, path: str, value: Any, known: tuple[str, ...]) -> Any:
        if value not in known:
            raise DialectError(f"{self.file}: {path}: {value!r} is not one of {', '.join(known)}")
        return value

    def _compiled(self, path: str, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except re.error as error:
            raise DialectError(f"{self.file}: {path}: not a regular expression: {error}") from error
