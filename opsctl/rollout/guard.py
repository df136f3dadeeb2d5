"""The guarded change itself: from armed dead-men to committed, held, reverted or stuck.

Each step writes the journal, then acts, and can be done twice; so ``resume`` is the same code, entered at the step
that the journal ends with::

    armed      every dead-man runs, so from here on silence means revert
    applied    the trials of a group are written; nothing runs them yet
    restarted  the whole group is stopped, then the whole group is started
    proving    boot, mounted files, arguments, ranks, completions, callers, the log
    soaking    the stability window; then the next group, or the decision (``settlement.py``), which is made once

A deployment of several replicas goes through applied to soaking once for each, the canary first, and is committed as
a whole. While one is at it, those that were changed before are watched too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from opsctl.rollout import flags, overlay, proof, settlement, verified
from opsctl.rollout.checks import Check, Outcome, run
from opsctl.rollout.course import Course
from opsctl.rollout.journal import State
from opsctl.rollout.result import Result, without_service
from opsctl.rollout.retreat import Committed, Retreat
from opsctl.rollout.scope import Scope
from opsctl.rollout.settlement import Undecided
from opsctl.rollout.target import Target
from opsctl.rollout.verified import Verified
from opsctl.rollout.watch import Crash, Watch
from opsctl.service.manager import LeaseLost, Locked, ServiceError, ServiceManager

_OTHERS_EVERY_S = 1.0


class Turn(Exception):
    """The way forward is closed. ``hold``: not because something failed, but because it cannot be told. ``of``: the
    service whose end it was, where it was one."""

    def __init__(self, why: str, *, hold: bool = False, of: str = "") -> None:
        super().__init__(why)
        self.hold, self.of = hold, of


class LockedOut(Exception):
    """Another operator was quicker; nothing was changed."""


@dataclass
class Guard:
    """``attended``: somebody watches, so what cannot be told is held for them instead of being reverted; ``scope``: how
    far the proof looks beside configuration and plain completions (a revert's never does)."""

    course: Course
    attended: bool = False
    scope: Scope | None = None
    _checks: list[Check] = field(default_factory=list)
    _boots: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._plan, self._target = self.course.plan, self.course.target
        self._retreat = Retreat(self.course)
        self._changed: list[ServiceManager] = []  # of groups that are proven already
        self._others_at = 0.0
        keep = self.course.waiter.meanwhile

        def meanwhile() -> None:
            keep()
            self._watch_others()

        self.course.waiter.meanwhile = meanwhile

    # The ways in.

    def apply(self) -> Result:
        """From the start, the plan being in the journal. Raises Locked when another operator holds a service: then nothing
        was changed."""
        try:
            return self._run(lambda: self._forward(State.armed))
        except LockedOut as error:
            raise Locked(str(error)) from error

    def resume(self) -> Result:
        """From where the journal ends."""
        decided = self.course.keeper.decided()
        if self.course.journal.state in (State.reverting, State.stuck) or "revert" in decided:
            why = (
                "the dead-man reverted while nobody renewed its lease" if "revert" in decided else f"resumed a revert ({self._last_why()})"
            )
            return self._run(lambda: self._revert(why))
        if decided:  # somebody decided to commit after every node was prepared: the others follow
            return self._run(self._follow)
        state = State.armed if self.course.journal.state is State.planned else self.course.journal.state
        return self._run(lambda: self._forward(State.proving if state is State.held else state))

    def abort(self, why: str) -> Result:
        """Back to the last verified configuration, because somebody said so."""
        return self._run(lambda: self._revert(why), ordered=True)

    # Forward.

    def _run(self, way: Callable[[], State], *, ordered: bool = False) -> Result:
        why, interrupted = "", False
        try:
            state = way()
        except Turn as turn:
            why = str(turn)
            state = self._hold(why) if turn.hold and self.attended else self._revert(why)
        except (ServiceError, OSError) as error:
            state = self._retreat.stuck(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            why, interrupted = "interrupted by its operator", True
            self.course.talk("interrupted: reverting; a second Ctrl-C leaves the rest to the dead-man")
            state = self._revert(why)
        why = why or self._last_why()
        moments = self.course.moments
        result = Result(id=self.course.journal.id, deployment=self._target.name, state=state, why=why, edits=self._plan.edits,
                        checks=tuple(self._checks), revert_checks=tuple(self._retreat.checks), page=self.course.page,
                        moments=moments, without_service_s=without_service(moments), interrupted=interrupted,
                        ordered=ordered)  # fmt: skip
        self.course.note(state, why, "result", result=result.text(), exit_code=int(result.exit_code), page_sent=result.page.sent)
        return result

    def _last_why(self) -> str:
        return str(next((e.data["why"] for e in reversed(self.course.journal.entries) if e.data.get("why")), ""))

    def _forward(self, first: State) -> State:
        """Raises Turn."""
        course, groups = self.course, self._target.groups
        proven = {entry.data["group"] for entry in self.course.journal.entries if entry.event == "proven"}
        try:
            if first is State.armed:
                course.write(State.armed, token=self.course.lease.token, ttl_s=self.course.lease.ttl_s)
            self._arm(first)
            if course.foreign():
                raise ServiceError(course.foreign())
            for number, group in enumerate(groups):
                name = group.managers[0].name
                which = "" if number == 0 else f"{name}: "
                under_way = first not in (State.armed, State.applied, State.restarted) and not self._changed_since(name, proven)
                adopt, soaked = name in proven or under_way, name in proven
                while not self._proven(group, number, which, adopt=adopt, soaked=soaked):
                    adopt = soaked = False
                self._changed += group.managers
            return self._commit()
        except LeaseLost as error:
            raise Turn(f"the lease was lost: {error}") from error
        except (Crash, ServiceError, OSError, flags.EditError) as error:
            raise Turn(f"{type(error).__name__}: {error}") from error

    def _proven(self, group: Target, number: int, which: str, *, adopt: bool, soaked: bool) -> bool:
        """Whether a replica was changed and proven. One after the canary may fail as often as the plan's budget says, over
        all of them, and is started once more each time. Raises Turn when it may not."""
        try:
            self._group(group, which, adopt=adopt, soaked=soaked)
        except Turn as turn:
            self._spend(group, number, turn)
            return False
        return True

    def _spend(self, group: Target, number: int, turn: Turn) -> None:
        name, spent = group.managers[0].name, sum(entry.event == "failed" for entry in self.course.journal.entries)
        its_own = turn.of in ("", *(manager.name for manager in group.managers))
        if number == 0 or turn.hold or not its_own or spent >= self._plan.failure_budget:
            raise turn
        self.course.write(State.restarted, "failed", group=name, why=str(turn))
        self.course.talk(f"{name} failed ({turn}); {spent + 1} of {self._plan.failure_budget} such failures: starting it once more")

    def _arm(self, first: State) -> None:
        try:
            self.course.keeper.arm()
        except Locked as error:
            if first is not State.armed:
                raise
            self.course.keeper.disarm()
            self.course.note(State.reverted, f"locked out before anything was changed: {error}")
            raise LockedOut(str(error)) from error

    def _changed_since(self, name: str, proven: set[str]) -> bool:
        """Whether the journal ends in another group than this one."""
        last = next((e.data["group"] for e in reversed(self.course.journal.entries) if "group" in e.data), name)
        return bool(last != name)

    def _group(self, group: Target, which: str, *, adopt: bool, soaked: bool) -> None:
        """One replica from its trial to the end of its stability window; ``adopt``: its running start may be taken."""
        course, name = self.course, group.managers[0].name
        if not (adopt and self._adopt(group)):
            course.write(State.applied, group=name)
            self._apply(group)
            course.drains.out(group)
            course.write(State.restarted, group=name)
            course.cycle(group, which, strict=True)
        invocations = {manager.name: course.frozen[manager.name].invocation_id for manager in group.managers}
        course.write(State.proving, group=name, invocations=invocations)
        self._prove(group, which)
        if not soaked:
            course.write(State.soaking, group=name)
            course.talk(f"proven; watching it for {self._plan.times.stable_s:g} s")
            self._take(course.proof(group, course.expected, self.scope, f"{which}first good answer").steady(self._plan.times.stable_s))
            course.write(State.soaking, "proven", group=name)

    def _apply(self, group: Target) -> None:
        planned = {service.name: service for service in self._plan.services}
        for manager in group.managers:
            self.course.keeper.renew()
            for one in self._plan.overlays:
                manager.keep_file(one.name, one.data())
            service = planned[manager.name]
            if service.unit and service.unit_text:
                manager.keep_file(service.unit.name, service.unit_text.encode())
            manager.write_trial(service.override())

    def _adopt(self, group: Target) -> bool:
        """After a resume: take the start that runs, if it runs the plan. Variables, mounted files and a unit file do not show
        in its arguments: then it must be a start that this rollout has made, and the change must still be in force (a
        reboot takes the trial away and starts what was before, under the same arguments)."""
        frozen, planned = {}, {service.name: service for service in self._plan.services}
        made = {one for entry in self.course.journal.entries for one in entry.data.get("invocations", {}).values()}
        for manager in group.managers:
            found, service = manager.snapshot(), planned[manager.name]
            if not found.running or not flags.same_command(self.course.expected.commands[manager.name].argv, manager.argv()):
                return False
            if service.more_than_arguments:
                change = manager.read_change()
                if found.invocation_id not in made or service.override() not in (change.trial, change.committed):
                    return False
            frozen[manager.name] = found
        self.course.frozen |= frozen
        return True

    def _prove(self, group: Target, which: str) -> None:
        if not which:
            self._checks.clear()
        found = self.course.proof(group, self.course.expected, self.scope, f"{which}first good answer")
        boot = found.boot(self._plan.times.boot_s)
        self._take(boot)
        mounts = {service.name: service.after.mounts for service in self._plan.services if service.after.mounts}
        if mounts:
            self._take(run("overlays", lambda: overlay.check(group.managers, mounts)))
        with contextlib.closing(found.serving()) as checks:
            for check in checks:
                self._take(check)
                if check.name == proof.SERVES:  # what clients get through their router is looked at next
                    self.course.drains.back(group)
        self._boots.append(boot)

    def _take(self, check: Check) -> None:
        """Raises Turn unless it passed."""
        self._checks.append(check)
        self.course.talk(f"{check.name}: {check.outcome}: {check.evidence}")
        if check.outcome is Outcome.passed:
            return
        self.course.mark("failure known")
        of = str(check.data.get("service", ""))
        raise Turn(f"{check.name}: {check.evidence}", hold=check.outcome in (Outcome.inconclusive, Outcome.error), of=of)

    def _watch_others(self) -> None:
        """Groups that were changed and proven before the present one must stay up. Raises Crash."""
        now = self.course.waiter.clock.monotonic()
        if self._changed and now - self._others_at >= _OTHERS_EVERY_S:
            self._others_at = now
            Watch(self._changed, self.course.frozen, self.course.waiter).look()

    # The end.

    def _commit(self) -> State:
        course = self.course
        self._changed.clear()
        course.keeper.lenient = True  # one node that is away must not keep the others from being renewed
        try:
            settlement.commit(self._target.managers, course.lease, course.waiter, lambda step: course.write(State.soaking, step))
        except Undecided as error:
            raise Turn(str(error)) from error
        return self._finish_commit()

    def _follow(self) -> State:
        self.course.keeper.arm()
        return self._commit()

    def _finish_commit(self) -> State:
        """Decided, so there is no way back: whatever fails here is tried again by ``resume`` and by the dead-man. A
        node that lost its trial meanwhile (it was rebooted) gets the committed override all the same."""
        course = self.course
        for manager, service in zip(self._target.managers, self._plan.services, strict=True):
            manager.commit_trial()
            if manager.read_change().committed != service.override():
                manager.restore(service.override())
        self._all_run_it()
        self._record()
        course.keeper.disarm()
        course.mark("committed")
        return State.committed

    def _record(self) -> None:
        """On this machine. The nodes run it whatever becomes of that, so a full disk here is told and undoes nothing."""
        course = self.course
        commands = {service.name: service.after for service in self._plan.services}
        known = Verified(
            deployment=self._target.name, at_utc=course.utc(), digest=self._plan.digest_after, services=commands, by=course.journal.id
        )
        for boot in self._boots:
            course.note_boot(boot, self._plan.digest_after, course.journal.id)
        try:
            verified.write(course.journal.path.parent, known)
            course.write(State.committed)
        except OSError as error:
            course.tell("committed, and not recorded", f"every node runs it; what is kept here could not be written: {error}\n"
                        "make room, then: opsctl rollout resume")  # fmt: skip

    def _all_run_it(self) -> None:
        """Each group runs what was committed; one that does not any more is started and proven. Raises ServiceError."""
        for group in self._target.groups:
            if self._adopt(group):
                self.course.drains.back_or_tell(group)
                continue
            self.course.talk(f"{', '.join(m.name for m in group.managers)}: committed, and does not run it; starting it again")
            self.course.cycle(group, "after the commit: ", strict=False)
            try:
                self._prove(group, "after the commit: ")
            except Turn as turn:
                raise ServiceError(f"committed on every node, and then it did not serve: {turn}") from turn

    def _hold(self, why: str) -> State:
        hold_s = self._plan.times.hold_s
        try:
            self.course.write(State.held, why=why)
            self.course.keeper.lengthen(hold_s)
        except (ServiceError, OSError) as error:
            return self._revert(f"{why}; and it cannot be held: {error}")
        for group in self._target.groups:  # nothing failed, and nobody may come for an hour
            self.course.drains.back_or_tell(group)
        self.course.tell("held", f"{why}\nresume or abort it within {hold_s / 60:.0f} min, else it reverts: opsctl rollout resume|abort")
        return State.held

    def _revert(self, why: str) -> State:
        self._changed.clear()
        try:
            return self._retreat.go(why)
        except Committed:
            self.course.talk("the rollout had been decided as committed before; finishing that")
            try:
                return self._finish_commit()
            except (ServiceError, OSError) as error:
                return self._retreat.stuck(f"{type(error).__name__}: {error}")


def known_exceptions(target: Target) -> list[str]:
    """Classes of the exceptions that the present start has logged, for ``Expectation``."""
    return sorted(proof.exceptions(target, {manager.name: manager.snapshot() for manager in target.managers}))
