"""Keep an eye on the clients after a change: do they still ask here, and does their own path still lead here?"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from monitors import engines
from monitors.fleet import Deployment
from opsctl.callers import path, traffic
from opsctl.callers.path import Led
from opsctl.callers.traffic import Collapse, Rates
from opsctl.rollout.probe import Api
from opsctl.rollout.target import Target
from opsctl.service.manager import Line
from opsctl.service.wait import Clock

_ARRIVES_S = 3.0
_POLL_S = 0.2
_SLACK_S = 60.0  # lines that were read before are read again, so that none is missed between two looks


@dataclass(frozen=True)
class Seen:
    """One look. ``counted`` are requests by caller in the window of ``seconds`` so far; ``led``: where each client's own
    path led when it was last followed."""

    seconds: float
    counted: Mapping[str, int]
    collapsed: tuple[Collapse, ...]
    led: tuple[Led, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        elsewhere = tuple(led.text for led in self.led if led.kind == path.ELSEWHERE)
        return (*(one.text for one in self.collapsed), *elsewhere)


@dataclass
class CallerWatch:
    """``rates`` are those of before the change, ``window_s`` over how long they are held against what comes; ``probe_s``:
    how often each client's own path is followed (0: never). Raises ServiceError from ``look`` when no log can be read."""

    deployment: Deployment
    target: Target
    api: Api
    rates: Rates
    clock: Clock
    window_s: float
    probe_s: float
    answer_s: float = 60.0
    _known: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    _samples: deque[tuple[float, Counter[str]]] = field(default_factory=deque)
    _begun: float | None = None
    _looked: float | None = None
    _followed: float | None = None
    _led: tuple[Led, ...] = ()

    def look(self) -> Seen:
        now = self.clock.monotonic()
        came: Counter[str] = Counter()
        since = _SLACK_S + (0.0 if self._looked is None else now - self._looked)
        for start, lines in self._logs(since).items():
            seen = traffic.requests([line.text for line in lines])
            # The first look only learns what was there; a start that appears later is counted whole.
            came.update(traffic.by_caller(seen - self._known.get(start, seen if self._begun is None else Counter())))
            self._known[start] = seen
        self._looked = now
        self._begun = now if self._begun is None else self._begun
        self._samples.append((now, came))
        while self._samples and now - self._samples[0][0] > self.window_s:
            self._samples.popleft()
        counted: Counter[str] = Counter()
        for _, sample in self._samples:
            counted.update(sample)
        seconds = min(now - self._begun, self.window_s)
        self._follow(now)
        return Seen(seconds, counted, tuple(traffic.collapses(self.rates, counted, seconds, self.names())), self._led)

    def names(self) -> dict[str, str]:
        found = {}
        for caller in self.deployment.caller:
            with contextlib.suppress(OSError):  # a key that cannot be read leaves its client without a name
                found[traffic.hash_of(caller, path.key_of(caller))] = caller.name
        return {key: name for key, name in found.items() if key}

    def _logs(self, last_s: float) -> dict[str, tuple[Line, ...]]:
        """The lines of each service's present start of the last seconds, by start."""
        found = {}
        for manager in self.target.managers:
            invocation = manager.snapshot().invocation_id
            if invocation:
                found[f"{manager.name} {invocation}"] = manager.log(invocation, last_s=last_s)
        return found

    def _follow(self, now: float) -> None:
        clients = [caller for caller in self.deployment.caller if caller.via]
        if not clients or not self.probe_s or (self._followed is not None and now - self._followed < self.probe_s):
            return
        self._followed = now
        seen: Callable[[str], bool | None] | None = self._arrives if self.target.speaks_digest else None
        self._led = tuple(path.follow(one, secrets.token_hex(6), self.answer_s, seen=seen, counter=self._tokens) for one in clients)

    def _arrives(self, sha: str) -> bool | None:
        """Whether a request of this digest comes to a log, within a few seconds; None when lines of one are lost."""
        until = self.clock.monotonic() + _ARRIVES_S
        while True:
            logs = self._logs(self.answer_s + _SLACK_S).values()
            if any(sha in traffic.shas([line.text for line in lines]) for lines in logs):
                return True
            if self.clock.monotonic() >= until:
                return None if any(line.lost for lines in logs for line in lines) else False
            self.clock.sleep(_POLL_S)

    def _tokens(self) -> float | None:
        return self.api.generated_tokens(tuple(engines.load(self.target.engine).metrics.progress))
