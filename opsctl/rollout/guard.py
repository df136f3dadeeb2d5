"""The guarded change itself: from armed dead-men to committed, held, reverted or stuck.

Each step writes the journal, then acts, and can be done twice; so ``resume`` is the same code, entered at the step
that the journal ends with::

    armed      every dead-man runs, so from here on silence means revert
    applied    every trial is written; nothing runs it yet
    restarted  the whole group is stopped, then the whole group is started
    proving    boot, arguments, ranks, a completion, the log
    soaking    the stability window; then the decision, which is made once, and the commit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from opsctl.rollout import checks, flags, proof, verified
from opsctl.rollout.checks import Check, Outcome
from opsctl.rollout.journal import Journal, State
from opsctl.rollout.keeper import Keeper
from opsctl.rollout.probe import Api
from opsctl.rollout.proof import Expectation, Proof
from opsctl.rollout.result import Page, Result, without_service
from opsctl.rollout.scope import Scope
from opsctl.rollout.target import Target
from opsctl.rollout.verified import Verified
from opsctl.service import wait
from opsctl.service.manager import Lease, LeaseLost, ServiceError, Snapshot
from opsctl.service.wait import Waiter

_BEGIN_S = 30.0


class Pager(Protocol):
    def page(self, title: str, body: str, key: str) -> Page: ...


class Turn(Exception):
    """The way forward is closed. ``hold``: not because something failed, but because it cannot be told."""

    def __init__(self, why: str, *, hold: bool = False) -> None:
        super().__init__(why)
        self.hold = hold


@dataclass
class Guard:
    """One rollout. ``baseline`` is the revert target; ``utc`` gives the time for records; ``attended``: somebody
    watches, so what cannot be told is held for them instead of being reverted; ``scope``: how far the proof looks beside
    configuration and plain completions (a revert's never does)."""

    target: Target
    journal: Journal
    api: Api
    lease: Lease
    baseline: Verified
    pager: Pager
    waiter: Waiter
    utc: Callable[[], str]
    attended: bool = False
    scope: Scope | None = None
    _frozen: Mapping[str, Snapshot] = field(default_factory=dict)
    _checks: list[Check] = field(default_factory=list)
    _revert_checks: list[Check] = field(default_factory=list)
    _moments: dict[str, float] = field(default_factory=dict)
    _page: Page = field(default_factory=Page)
    _answered: str = "first good answer"

    def __post_init__(self) -> None:
        self._plan = self.journal.plan
        self._start = self.waiter.clock.monotonic()
        self._keeper = Keeper(self.target.managers, self.lease, self.waiter.clock.monotonic, self.waiter.talk)
        self.waiter = Waiter(self.waiter.talk, self._keeper.renew, self.waiter.clock, self.waiter.poll_s, self.waiter.say_every_s)
        known: list[str] = next((entry.data["known_exceptions"] for entry in self.journal.entries if "known_exceptions" in entry.data), [])
        self._expected = Expectation(self._plan.digest_after, {s.name: s.after for s in self._plan.services}, frozenset(known))

    # The ways in.

    def apply(self) -> Result:
        """From the start, the plan being in the journal."""
        return self._run(lambda: self._forward(State.armed))

    def resume(self) -> Result:
        """From where the journal ends."""
        decided = self._keeper.decided()
        if self.journal.state is State.reverting or "revert" in decided:
            why = "resumed a revert" if self.journal.state is State.reverting else "the dead-man reverted while nobody renewed its lease"
            return self._run(lambda: self._revert(why))
        if decided and set(decided) == {"commit"}:
            return self._run(self._finish_commit)
        state = State.armed if self.journal.state is State.planned else self.journal.state
        return self._run(lambda: self._forward(State.proving if state is State.held else state))

    def abort(self, why: str) -> Result:
        """Back to the last verified configuration."""
        return self._run(lambda: self._revert(why))

    # Forward.

    def _run(self, way: Callable[[], State]) -> Result:
        why, interrupted = "", False
        try:
            state = way()
        except Turn as turn:
            why = str(turn)
            state = self._hold(why) if turn.hold and self.attended else self._revert(why)
        except (ServiceError, OSError) as error:
            state = self._stuck(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            why, interrupted = "interrupted by its operator", True
            self.waiter.talk("interrupted: reverting; a second Ctrl-C leaves the rest to the dead-man")
            state = self._revert(why)
        why = why or self._last_why()
        return Result(id=self.journal.id, deployment=self.target.name, state=state, why=why, edits=self._plan.edits,
                      checks=tuple(self._checks), revert_checks=tuple(self._revert_checks), page=self._page,
                      moments=self._moments, without_service_s=without_service(self._moments), interrupted=interrupted)  # fmt: skip

    def _last_why(self) -> str:
        return str(next((e.data["why"] for e in reversed(self.journal.entries) if e.data.get("why")), ""))

    def _forward(self, first: State) -> State:
        """Raises Turn."""
        try:
            if first is State.armed:
                self.journal.write(State.armed, token=self.lease.token, ttl_s=self.lease.ttl_s)
            self._keeper.arm()
            if first in (State.armed, State.applied):
                self._apply()
            if first in (State.armed, State.applied, State.restarted) or not self._adopt():
                self._restart()
            self._prove()
            self._soak()
            return self._commit()
        except LeaseLost as error:
            raise Turn(f"the lease was lost: {error}") from error
        except (ServiceError, OSError) as error:
            raise Turn(f"{type(error).__name__}: {error}") from error

    def _apply(self) -> None:
        self.journal.write(State.applied)
        for manager, service in zip(self.target.managers, self._plan.services, strict=True):
            self._keeper.renew()
            manager.write_trial(service.override())

    def _restart(self) -> None:
        self.journal.write(State.restarted)
        self._frozen = self._cycle()

    def _cycle(self, which: str = "") -> Mapping[str, Snapshot]:
        self._mark(f"{which}group stopping")
        self.waiter.talk(f"stopping {', '.join(m.name for m in self.target.managers)}")
        wait.stop(self.target.managers, self.waiter, self._plan.times.stop_s)
        self.waiter.talk("starting")
        begun = wait.start(self.target.managers, self.waiter, _BEGIN_S)
        self._mark(f"{which}group started")
        return begun

    def _adopt(self) -> bool:
        """After a resume: take the start that runs, if it runs the plan."""
        frozen = {}
        for manager in self.target.managers:
            found = manager.snapshot()
            if not found.running or not flags.same_command(self._expected.commands[manager.name].argv, manager.argv()):
                return False
            frozen[manager.name] = found
        self._frozen = frozen
        return True

    def _prove(self) -> None:
        self.journal.write(State.proving, invocations={name: snapshot.invocation_id for name, snapshot in self._frozen.items()})
        self._checks.clear()
        found = self._proof(self._expected, self.scope)
        boot = found.boot(self._plan.times.boot_s)
        self._take(boot)
        for check in found.serving():
            self._take(check)

    def _soak(self) -> None:
        self.journal.write(State.soaking)
        self.waiter.talk(f"proven; watching it for {self._plan.times.stable_s:g} s")
        self._take(self._proof(self._expected, self.scope).steady(self._plan.times.stable_s))

    def _proof(self, expected: Expectation, scope: Scope | None = None) -> Proof:
        return Proof(self.target, expected, self._frozen, self.api, self.waiter, answer_s=self._plan.times.answer_s,
                     first_answer=self._first_answer, scope=scope)  # fmt: skip

    def _first_answer(self) -> None:
        self._moments.setdefault(self._answered, self._now())

    def _take(self, check: Check) -> None:
        """Raises Turn unless it passed."""
        self._checks.append(check)
        self.waiter.talk(f"{check.name}: {check.outcome}: {check.evidence}")
        if check.outcome is Outcome.passed:
            return
        self._mark("failure known")
        raise Turn(f"{check.name}: {check.evidence}", hold=check.outcome in (Outcome.inconclusive, Outcome.error))

    def _commit(self) -> State:
        self.journal.write(State.soaking, "commit")
        if set(self._keeper.decide("commit")) != {"commit"}:
            raise Turn("the dead-man had decided to revert before the commit")
        return self._finish_commit()

    def _finish_commit(self) -> State:
        """Decided, so there is no way back: whatever fails here is tried again by ``resume`` and by the dead-man."""
        for manager in self.target.managers:
            manager.commit_trial()
        commands = {service.name: service.after for service in self._plan.services}
        verified.write(self.journal.path.parent, Verified(
            deployment=self.target.name, at_utc=self.utc(), digest=self._plan.digest_after, services=commands, by=self.journal.id,
        ))  # fmt: skip
        self.journal.write(State.committed)
        self._keeper.disarm()
        self._mark("committed")
        return State.committed

    def _hold(self, why: str) -> State:
        hold_s = self._plan.times.hold_s
        try:
            self.journal.write(State.held, why=why)
            self._keeper.lengthen(hold_s)
        except (ServiceError, OSError) as error:
            return self._revert(f"{why}; and it cannot be held: {error}")
        self._tell("held", f"{why}\nresume or abort it within {hold_s / 60:.0f} min, else it reverts: opsctl rollout resume|abort")
        return State.held

    # Back.

    def _revert(self, why: str) -> State:
        """To the last verified configuration, proven by the same checks; one more look when a dead-man was quicker."""
        self.waiter.talk(f"reverting: {why}")
        self._mark("revert begun")
        self._answered = "revert: first good answer"
        self._note(State.reverting, why)
        self._keeper.lenient = True
        try:
            self._keeper.arm()
            decisions = self._keeper.decide("revert")
            if set(decisions) == {"commit"}:
                self.waiter.talk("the rollout had been decided as committed before; finishing that")
                return self._finish_commit()
            if "commit" in decisions:
                return self._stuck(f"{why}; and its services were decided differently: {decisions}")
            for manager in self.target.managers:
                self._keeper.renew()
                manager.remove_trial()
            self._frozen = self._cycle("revert: ")
            proven = self._prove_revert()
            if not proven and self._dead_man_was_quicker():
                proven = self._prove_revert()
        except (ServiceError, OSError) as error:
            return self._stuck(f"{why}; then the revert failed: {type(error).__name__}: {error}")
        if not proven:
            last = self._revert_checks[-1]
            return self._stuck(f"{why}; then the revert was not proven: {last.name}: {last.evidence}")
        self._note(State.reverted, why)
        self._keeper.disarm()
        self._mark("reverted")
        self._tell("reverted", f"{why}\nThe last verified configuration serves again, proven by a completion.")
        return State.reverted

    def _prove_revert(self) -> bool:
        expected = Expectation(self.baseline.digest, self.baseline.services, self._expected.known_exceptions)
        found = self._proof(expected)
        self._revert_checks.clear()
        for check in (found.boot(self._plan.times.boot_s), *found.serving()):
            self._revert_checks.append(check)
            self.waiter.talk(f"revert: {check.name}: {check.outcome}: {check.evidence}")
        return checks.overall(self._revert_checks) is Outcome.passed

    def _dead_man_was_quicker(self) -> bool:
        """It restarts what it reverts, which ends the start that was being proven: look at the start that runs now."""
        now = {manager.name: manager.snapshot() for manager in self.target.managers}
        moved = any(now[name].invocation_id != self._frozen[name].invocation_id and now[name].restarts == 0 for name in now)
        self._frozen = now
        return moved

    def _stuck(self, why: str) -> State:
        self.waiter.talk(f"STUCK: {why}")
        self._note(State.stuck, why)
        self._mark("stuck")
        self._tell("STUCK", f"{why}\nIt is not known that anybody is served. Look at it now: opsctl rollout status")
        return State.stuck

    def _note(self, state: State, why: str) -> None:
        """On the way back a journal that cannot be written is said and does not stop the revert."""
        try:
            self.journal.write(state, why=why)
        except OSError as error:
            self.waiter.talk(f"{self.journal.path}: cannot be written: {error}")

    # Telling.

    def _tell(self, what: str, body: str) -> None:
        title = f"{self.target.name}: rollout {what}"
        self._page = self.pager.page(title, f"{body}\nrollout {self.journal.id}: {' '.join(self._plan.edits)}", self.journal.id)
        self.waiter.talk("paged" if self._page.sent else f"no page went out: {self._page.reason}")

    def _now(self) -> float:
        return round(self.waiter.clock.monotonic() - self._start, 3)

    def _mark(self, name: str) -> None:
        self._moments[name] = self._now()


def known_exceptions(target: Target) -> list[str]:
    """Classes of the exceptions that the present start has logged, for ``Expectation``."""
    return sorted(proof.exceptions(target, {manager.name: manager.snapshot() for manager in target.managers}))
