"""The proof that a group serves, and serves what was planned. The same checks prove a change and a revert.

Every check is about one frozen invocation of each service and looks at it before and after, so nothing that an
earlier start left behind (a log line, a black box, a counter) can pass or fail it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from monitors import engines
from opsctl.rollout import checks, flags, logcheck, soak, truth
from opsctl.rollout.before import Before
from opsctl.rollout.checks import Check, Outcome
from opsctl.rollout.comparison import Comparison
from opsctl.rollout.plan import Command
from opsctl.rollout.probe import Api, ApiError, Completion
from opsctl.rollout.reply import Reply, degenerate
from opsctl.rollout.scope import Scope
from opsctl.rollout.sentry import Sentry
from opsctl.rollout.target import Target
from opsctl.rollout.traces import exception, tracebacks
from opsctl.rollout.watch import Watch
from opsctl.service.manager import Line, Snapshot, State
from opsctl.service.wait import Deadline, Waiter

SERVES = "log"  # the check that ends the plain proof: configuration, a completion, no exception
_LOG_S = 5.0  # how long a request's line may take to reach the log
_SLACK_S = 60.0
_KNOWN_S = 86400.0  # exceptions of an earlier day are no news of a start, and its log may be of months


@dataclass(frozen=True)
class Expectation:
    """What must be seen. ``digest`` is empty where the engine has none; ``known_exceptions`` are classes that the
    last start's log held as well."""

    digest: str
    commands: Mapping[str, Command]
    known_exceptions: frozenset[str] = frozenset()


class Proof:
    """Checks of one start of a group. ``first_answer`` is called after the first good completion. With a ``scope`` the
    clients, the greedy answers and the speed are looked at too; a revert is proven without, by its configuration and a
    plain completion, so that it is quick and sends nobody's request."""

    def __init__(
        self, target: Target, expected: Expectation, frozen: Mapping[str, Snapshot], api: Api, waiter: Waiter,
        *, answer_s: float, first_answer: Callable[[], None] = lambda: None, scope: Scope | None = None,
    ) -> None:  # fmt: skip
        self._target, self._expected, self._frozen, self._api = target, expected, frozen, api
        self._waiter, self._answer_s, self._first_answer = waiter, answer_s, first_answer
        self._watch = Watch(target.managers, frozen, waiter)
        self._scope, self._changed = scope, scope.changed if scope else frozenset()
        self._comparison = (
            Comparison(target, frozen, api, self._watch, waiter, scope, answer_s=answer_s, faulty=self._faulty) if scope else None
        )

    def boot(self, deadline_s: float) -> Check:
        """Every service active and the API healthy, within the deadline."""

        def up() -> bool:
            return all(m.snapshot().state is State.active for m in self._target.managers) and self._api.healthy()

        def check() -> Check:
            start = self._waiter.clock.monotonic()
            self._watch.until(f"{self._target.name} to boot", up, deadline_s)
            took = self._waiter.clock.monotonic() - start
            return checks.passed("boot", f"ready after {took:.1f} s", seconds=round(took, 3))

        return checks.run("boot", check)

    def serving(self) -> Generator[Check]:
        """In order: what runs is what was planned, it answers, its log is clean. Ends at the first failure. With a scope the
        hang monitor is armed meanwhile, so that a hang is known (and captured) long before an answer's deadline; it is
        disarmed at the end, or when this is closed."""
        with self._guarded():
            for name, check in (("argv", self._argv), ("ranks", self._ranks), ("completion", self._completion), ("log", self._log)):
                found = checks.run(name, check, self._watch)
                yield found
                if found.outcome is not Outcome.passed and found.outcome is not Outcome.inconclusive:
                    return
            yield from self._comparison.checks() if self._comparison else ()

    def before(self, at_utc: str) -> Before:
        """What this start is like, for a later comparison. Needs a scope. Raises ApiError, Crash, Deadline, ServiceError."""
        assert self._comparison is not None
        return self._comparison.before(at_utc)

    def steady(self, window_s: float) -> Check:
        """The stability window, see ``soak.py``; with a scope the hang monitor is armed for it."""

        def check() -> Check:
            with self._guarded() as sentry:
                return soak.steady(window_s, self._watch, self._waiter, answer=lambda: self._check_answer(self._answer()), log=self._log,
                                   texts=self._texts, sentry=sentry, scope=self._scope)  # fmt: skip

        return checks.run("steady", check, self._watch)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[Sentry | None]:
        """The hang monitor on this start, where there is a scope. Raises ServiceError, OSError."""
        if self._scope is None:
            yield None
            return
        run_dirs = {m.name: m.run_dir or m.manager.run_dir() for m in self._target.members}
        with contextlib.closing(Sentry(self._scope.deployment, run_dirs, self._scope.bundles)) as sentry:
            silent, self._watch.alarm = self._watch.alarm, sentry.alarm
            try:
                yield sentry
            finally:
                self._watch.alarm = silent

    def _texts(self) -> list[str]:
        return [line.text for lines in self._logs(_KNOWN_S).values() for line in lines]

    def _logs(self, last_s: float) -> dict[str, tuple[Line, ...]]:
        return {m.name: m.log(self._frozen[m.name].invocation_id, last_s=last_s) for m in self._target.managers}

    # The single checks.

    def _argv(self) -> Check:
        for manager in self._target.managers:
            planned, running = self._expected.commands[manager.name].argv, manager.argv()
            if not running:
                return checks.inconclusive("argv", f"{manager.name}: the main process's arguments cannot be read")
            if not flags.same_command(planned, running):
                return checks.failed("argv", f"{manager.name}: runs {_join(running)}, planned was {_join(planned)}")
        self._watch.look()
        return checks.passed("argv", "every main process runs the planned arguments")

    def _ranks(self) -> Check:
        """Rank truth, see ``truth.py``."""
        dialect = engines.load(self._target.engine)
        if self._target.speaks_digest:
            info = self._watch.during("/server_info", self._api.server_info, 15.0)
            found = truth.of_boxes(self._target, self._frozen, info, self._expected.digest)
        else:
            planned = {name: command.argv for name, command in self._expected.commands.items()}
            ask = functools.partial(self._watch.during, "the server's settings", lambda: self._api.info(dialect.config.routes), 15.0)
            found = truth.of_arguments(self._target, planned, self._changed, dialect.config, ask)
        self._watch.look()
        return found

    def _answer(self) -> Completion:
        return self._watch.during("an answer", lambda: self._api.complete(self._answer_s), self._answer_s + 10.0)

    def _check_answer(self, answer: Completion) -> None:
        """Raises ApiError when it is not a good one."""
        why = degenerate(answer.text) or self._wrong(answer.finish, answer.fingerprint)
        if why:
            raise ApiError(f"a completion of this start: {why}")

    def _faulty(self, reply: Reply) -> str:
        return self._wrong(reply.finish, reply.fingerprint)

    def _wrong(self, finish: str, fingerprint: str) -> str:
        """Why an answer is not one that this start gives; empty when it is."""
        if finish not in ("stop", "length", "tool_calls"):
            return f"finish_reason is {finish or 'missing'!r}"
        if self._target.speaks_digest:
            allowed = {f"lb-{self._expected.digest[:12]}-{snapshot.invocation_id[:8]}" for snapshot in self._frozen.values()}
            if fingerprint not in allowed:
                return f"system_fingerprint is {fingerprint!r}, not {' or '.join(sorted(allowed))}"
        return ""

    def _completion(self) -> Check:
        """A nonce that nobody asked before: answered by this configuration, in this log, on these counters."""
        names = tuple(engines.load(self._target.engine).metrics.progress)
        before = self._watch.during("/metrics", lambda: self._api.generated_tokens(names), 15.0)
        answer = self._answer()
        self._check_answer(answer)
        self._first_answer()
        after = self._watch.during("/metrics", lambda: self._api.generated_tokens(names), 15.0)
        data = {
            "prompt_sha": answer.prompt_sha,
            "fingerprint": answer.fingerprint,
            "finish": answer.finish,
            "seconds": round(answer.seconds, 3),
        }
        if before is not None and after is not None and after <= before:
            return checks.failed(
                "completion", f"an answer came, but this server's token counters stand at {after:g}: who answered?", **data
            )
        if self._target.speaks_digest:
            mark = f"prompt_sha={answer.prompt_sha}"
            try:
                self._watch.until("the request's line in the log", lambda: self._logged(mark), _LOG_S)
            except Deadline:
                if not (gap := logcheck.gap(self._logs(self._answer_s + _SLACK_S))):
                    raise
                return checks.inconclusive(
                    "completion", f"answered; its line may be among those that the log has lost: {gap}", gap=gap, **data
                )
            # A proxy before the API may give its own request id, so the nonce's digest decides and the id is told.
            data |= {"rid": answer.rid, "rid_logged": self._logged(f"rid={answer.rid} ")}
        elif before is None or after is None:
            return checks.inconclusive("completion", "answered, but there are no token counters to show that this server did it", **data)
        return checks.passed(
            "completion", f"a nonce was answered in {answer.seconds:.2f} s by {answer.fingerprint or self._api.base}", **data
        )

    def _logged(self, mark: str) -> bool:
        logs = self._logs(self._answer_s + _SLACK_S)
        return any(mark in line.text and "req " in line.text for lines in logs.values() for line in lines)

    def _log(self) -> Check:
        """No traceback in the lines of this start whose exception the last start's log did not hold."""
        found = logcheck.clean(self._logs(_KNOWN_S), self._expected.known_exceptions)
        self._watch.look()
        return found


def exceptions(target: Target, frozen: Mapping[str, Snapshot]) -> frozenset[str]:
    """Classes of the exceptions in the log of a start."""
    return frozenset(
        exception(trace) for manager in target.managers if frozen[manager.name].invocation_id
        for trace in tracebacks(manager.log(frozen[manager.name].invocation_id, last_s=_KNOWN_S))
    )  # fmt: skip


def _join(argv: Sequence[str]) -> str:
    return json.dumps(list(argv))
