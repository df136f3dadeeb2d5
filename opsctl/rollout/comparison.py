"""What is looked at before a change, and the checks that hold the same look after it against that.

Like every check of a start, these are about frozen invocations: a crash while one of them asks is known at once.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from monitors import engines
from monitors.fleet import Caller
from opsctl.callers import matrix, path, traffic
from opsctl.callers.answer import Answered
from opsctl.callers.foresee import refused
from opsctl.rollout import checks, throughput
from opsctl.rollout.before import Before
from opsctl.rollout.checks import Check, Outcome
from opsctl.rollout.probe import Api, ApiError
from opsctl.rollout.reply import Reply
from opsctl.rollout.scope import Scope
from opsctl.rollout.smoke import drift, ladder
from opsctl.rollout.target import Target
from opsctl.rollout.watch import Watch
from opsctl.service.manager import Line, ServiceError, Snapshot
from opsctl.service.wait import Waiter

_LOG_S = 3.0  # how long a request's line may take to reach the log
_SHORT_S = 15.0
_RATE_WINDOW_S = 600.0
_LOST = ("none", "degenerate", "faulty")  # no answer of these is excused by what was before
_T = TypeVar("_T")


class Comparison:
    """``faulty`` says why a 200 is not this start's good answer, empty when it is."""

    def __init__(
        self, target: Target, frozen: Mapping[str, Snapshot], api: Api, watch: Watch, waiter: Waiter, scope: Scope, *,
        answer_s: float, faulty: Callable[[Reply], str],
    ) -> None:  # fmt: skip
        self._target, self._frozen, self._api, self._watch, self._waiter = target, frozen, api, watch, waiter
        self._scope, self._answer_s, self._faulty = scope, answer_s, faulty
        self._dialect = engines.load(target.engine)
        self._nonce: Callable[[], str] = lambda: secrets.token_hex(6)

    def before(self, at_utc: str) -> Before:
        """The look before a change. Raises ApiError when the server does not answer as any server must; Crash, Deadline,
        ServiceError."""
        unsent = [caller.name for caller in self._scope.callers if not matrix.sent(caller)]
        if unsent:
            self._waiter.talk(f"not sent (never-live): {', '.join(unsent)}")

        # All in one call: each call looks at every service before and after, and on distant nodes that is what takes time.
        def look() -> tuple[dict[str, str], dict[str, str], dict[str, Answered]]:
            rungs = {rung.name: self._lost_is_no_baseline(rung, self._climb(rung)) for rung in self._rungs()}
            return drift.answers(self._ask), rungs, matrix.ask_all(self._scope.callers, self._ask, self._nonce)

        greedy, rungs, classes = self._during("what the server answers now", look, 16.0 + len(self._scope.callers))
        speed = self._speed() if self._scope.allowance_pct is not None else None
        return Before(
            at_utc=at_utc, classes={name: found.kind for name, found in classes.items()}, rungs=rungs, greedy=greedy, exact=self._exact(),
            rates=traffic.rates(self._texts(_RATE_WINDOW_S + self._answer_s), _RATE_WINDOW_S),
            paths={led.caller: led.kind for led in self._follow_all()}, speed=speed,
        )  # fmt: skip

    def checks(self) -> Iterator[Check]:
        """In order of what they cost; the reader stops when one has failed."""
        before = self._scope.before
        if before is not None and before.greedy and self._scope.same_model:
            yield checks.run("drift", lambda: self._drift(before), self._watch)
        yield from self._ladder()
        if self._scope.callers:
            yield checks.run("callers", self._callers, self._watch)
        if any(caller.via for caller in self._scope.callers):
            yield checks.run("client path", self._paths, self._watch)
        if self._scope.allowance_pct is not None:
            yield checks.run("throughput", self._throughput, self._watch)

    # Asking.

    def _ask(self, request: Mapping[str, object]) -> Reply:
        return self._api.ask(request, self._answer_s)

    def _during(self, what: str, call: Callable[[], _T], times: float = 4.0) -> _T:
        """``times``: how many answers' time all of it may take."""
        return self._watch.during(what, call, times * self._answer_s + 10.0)

    def _texts(self, last_s: float) -> list[str]:
        return [line.text for line in self._lines(last_s)]

    def _lines(self, last_s: float) -> list[Line]:
        """The lines of this start of the last seconds, of all its services."""
        return [
            line for manager in self._target.managers if self._frozen[manager.name].invocation_id
            for line in manager.log(self._frozen[manager.name].invocation_id, last_s=last_s)
        ]  # fmt: skip

    def _tokens(self) -> float | None:
        return self._api.generated_tokens(tuple(self._dialect.metrics.progress))

    # Drift.

    def _drift(self, before: Before) -> Check:
        after = self._during("greedy answers", lambda: drift.answers(self._ask))
        share = drift.tolerance(self._scope.deployment.drift_share, exact=before.exact and self._exact())
        return drift.compare(before.greedy, after, share)

    def _exact(self) -> bool:
        """Whether the server says that it computes in float32."""
        info = self._watch.during("its settings", lambda: self._api.info(self._dialect.config.routes), _SHORT_S) or {}
        model = (info.get("config") or {}).get("model") or {}
        return str(model.get("dtype") or info.get("dtype")) in ("float32", "torch.float32", "float")

    # The smoke ladder.

    def _ladder(self) -> Iterator[Check]:
        """Climbed in one call, up to the first rung that is lost."""
        rungs: list[ladder.Rung] = []
        climbed: dict[str, ladder.Climbed] = {}

        def climb() -> None:
            rungs.extend(self._rungs())
            for rung in rungs:
                climbed[rung.name] = self._climb(rung)
                if self._judge(rung, climbed[rung.name]).outcome is Outcome.failed:
                    return

        def whole() -> Check:
            self._during("the smoke ladder", climb, 16.0)
            return checks.passed("smoke ladder", "")

        found = checks.run("smoke ladder", whole, self._watch)
        for rung in rungs:
            if rung.name in climbed:
                yield checks.run(rung.name, lambda rung=rung: self._judge(rung, climbed[rung.name]), self._watch)  # type: ignore[misc]
            elif found.outcome is not Outcome.passed:
                yield msgspec.structs.replace(found, name=rung.name)
                return
        if not rungs:
            yield found if found.outcome is not Outcome.passed else checks.inconclusive("smoke ladder", "no rung may be sent")

    def _rungs(self) -> list[ladder.Rung]:
        unsent = [caller.request for caller in self._scope.callers if not matrix.sent(caller)]
        found = []
        for rung in ladder.rungs(self._ask, self._nonce, context=self._api.context_length(), faulty=self._faulty):
            if ladder.left_out(rung, unsent):
                self._waiter.talk(f"{rung.name}: not sent: requests of its shape are marked never-live in the fleet file")
            else:
                found.append(rung)
        return found

    def _climb(self, rung: ladder.Rung) -> ladder.Climbed:
        will, _ = refused(self._scope.flags, rung.shape, self._dialect)
        return ladder.climb(rung, lambda kind: kind in (rung.want, will))

    def _lost_is_no_baseline(self, rung: ladder.Rung, climbed: ladder.Climbed) -> str:
        """No change can be blamed for a rung that is lost already, so none may be made on top of it. Raises ApiError."""
        if climbed.kind in _LOST:
            raise ApiError(f"{rung.name}: {climbed.kind} before anything was changed: {climbed.detail}")
        return climbed.kind

    def _judge(self, rung: ladder.Rung, found: ladder.Climbed) -> Check:
        will, why = refused(self._scope.flags, rung.shape, self._dialect)
        data = {"kind": found.kind}
        if found.kind == rung.want:
            return checks.passed(rung.name, found.detail, **data)
        if will and found.kind == will:
            return checks.passed(rung.name, f"{will}, as planned: {why}", **data)
        was = self._scope.before.rungs.get(rung.name) if self._scope.before else None
        if found.kind == was and found.kind not in _LOST:
            return checks.passed(rung.name, f"{found.kind}, as before the change ({found.detail})", **data)
        if was is None and rung.want != "text" and found.kind not in _LOST:
            return checks.inconclusive(rung.name, f"{found.kind}, and how it was before is not recorded ({found.detail})", **data)
        return checks.failed(rung.name, f"{found.kind} where {was or rung.want} is due: {found.detail}", **data)

    # Callers.

    def _callers(self) -> Check:
        scope = self._scope
        rows = self._during("the callers' requests", lambda: matrix.compare(
            scope.callers, self._ask, self._nonce, before=scope.classes, agreed=scope.agreed, foreseen=scope.foreseen,
        ), 4.0 * (1 + len(scope.callers)))  # fmt: skip
        data = {"callers": [{**vars(row), "outcome": str(row.outcome)} for row in rows]}
        worst = next((o for o in (Outcome.failed, Outcome.inconclusive) if any(row.outcome is o for row in rows)), Outcome.passed)
        told = [row.text for row in rows if row.outcome is worst or row.must]
        text = "; ".join(told) if worst is not Outcome.passed or any(row.must for row in rows) else "; ".join(row.text for row in rows)
        return Check("callers", worst, text, data)

    def _follow_all(self) -> list[path.Led]:
        return [self._follow(caller) for caller in self._scope.callers if caller.via]

    def _follow(self, caller: Caller) -> path.Led:
        arrives = self._arrives if self._target.speaks_digest else None
        follow = functools.partial(path.follow, caller, self._nonce(), self._answer_s, seen=arrives, counter=self._tokens)
        return self._during(f"the path of {caller.name}", follow, 1.0 + _LOG_S / self._answer_s)

    def _arrives(self, sha: str) -> bool | None:
        """Whether a request of this digest comes to the server's log, within a few seconds; None when lines of it are lost."""
        clock = self._waiter.clock
        until = clock.monotonic() + _LOG_S
        while True:
            lines = self._lines(2 * self._answer_s)
            if sha in traffic.shas([line.text for line in lines]):
                return True
            if clock.monotonic() >= until:
                return None if any(line.lost for line in lines) else False
            clock.sleep(self._waiter.poll_s)

    def _paths(self) -> Check:
        """Hosted-fallback guard: what clients ask through their own path must arrive here."""
        wrong: list[path.Led] = []
        unknown: list[path.Led] = []
        told = []
        was = self._scope.before.paths if self._scope.before else {}
        for led in self._follow_all():
            told.append(led.text)
            agreed = self._scope.agreed.get(led.caller)
            if led.kind == path.HERE or (agreed is not None and led.kind == agreed.to):
                continue
            same = led.kind == was.get(led.caller) and led.kind != path.ELSEWHERE
            (unknown if same or led.kind == path.UNKNOWN else wrong).append(led)
        if wrong:
            text = "; ".join(led.text for led in wrong)
            return checks.failed("client path", text, verdicts=[led.kind for led in wrong])
        if unknown:
            text = "; ".join(f"{led.text}{', as before the change' if led.kind == was.get(led.caller) else ''}" for led in unknown)
            return checks.inconclusive("client path", text)
        return checks.passed("client path", "; ".join(told))

    # Throughput.

    def _throughput(self) -> Check:
        before, allowance = self._scope.before, self._scope.allowance_pct
        assert allowance is not None
        was = before.speed if before else None
        if was is None:
            return checks.inconclusive("throughput", "it was not measured before the change")
        now = self._speed()
        found = throughput.compare(was, now, allowance)
        if found.outcome is Outcome.inconclusive:  # more of the same may tell
            now = throughput.more(now, self._speed())
            found = throughput.compare(was, now, allowance)
        return found

    def _speed(self) -> throughput.Speed:
        return self._during("the load that measures speed", lambda: throughput.measure(
            self._ask, self._nonce, counter=self._tokens, load=self._load), 30.0)  # fmt: skip

    def _load(self) -> dict[str, float]:
        """The load average of each node; one that cannot be asked is left out."""
        found = {}
        for manager in self._target.managers:
            try:
                found[manager.node] = float(manager.read_file("/proc/loadavg").split()[0])
            except (ServiceError, OSError, ValueError, IndexError):
                continue
        return found
