"""The way back: to the last verified configuration, proven by the same checks as the way forward, or stuck and paged."""

from __future__ import annotations

from dataclasses import dataclass, field

from opsctl.rollout import checks, flags, settlement
from opsctl.rollout.checks import Check
from opsctl.rollout.course import Course
from opsctl.rollout.journal import State
from opsctl.rollout.proof import Expectation
from opsctl.rollout.target import Target
from opsctl.service.manager import Locked, ServiceError, Unreachable
from opsctl.service.wait import Deadline

_ANSWERED = "revert: first good answer"
_MARGIN_S = 15.0


class Committed(Exception):
    """There is no way back any more: every node had committed."""


@dataclass
class Retreat:
    course: Course
    checks: list[Check] = field(default_factory=list)

    def go(self, why: str) -> State:
        """Reverted or stuck. Raises Committed."""
        course = self.course
        course.talk(f"reverting: {why}")
        course.mark("revert begun")
        course.note(State.reverting, why)
        course.keeper.lenient = True
        if course.foreign():
            return self.stuck(f"{why}; and {course.foreign()}")
        try:
            away = self._take_away()
            proven = self._serve_again(away)
        except Locked as error:
            return self.stuck(f"{why}; and another rollout is at it, which was left alone: {error}")
        except (ServiceError, OSError) as error:
            return self.stuck(f"{why}; then the revert failed: {type(error).__name__}: {error}")
        if away:
            told = "; ".join(f"{name}: {text}" for name, text in away.items())
            return self.stuck(
                f"{why}; then these could not be reached to revert: {told}. Their own dead-men have reverted them by now if they live; "
                "nobody here has seen it"
            )
        if not proven:
            last = next((check for check in reversed(self.checks) if not checks.proven([check])), self.checks[-1])
            return self.stuck(f"{why}; then the revert was not proven: {last.name}: {last.evidence}")
        course.note(State.reverted, why)
        course.keeper.disarm()
        course.mark("reverted")
        course.tell("reverted", f"{why}\nThe last verified configuration serves again, proven by a completion.")
        return State.reverted

    def _take_away(self) -> dict[str, str]:
        """The change is gone from every node that answers before its lease has ended; name -> why for the others."""
        course, managers = self.course, self.course.target.managers
        course.keeper.arm_reachable()
        if self._all_committed():
            raise Committed
        away = settlement.go_back(managers, course.lease, course.overrides_before)
        if not away:
            return {}

        def reached() -> bool:
            again = [manager for manager in managers if manager.name in away]
            away.clear()
            away.update(settlement.go_back(again, course.lease, course.overrides_before))
            return not away

        try:
            course.waiter.until(f"{', '.join(away)} to be reached", reached, course.lease.ttl_s + _MARGIN_S)
        except Deadline:
            return dict(away)
        course.keeper.arm_reachable()
        return {}

    def _all_committed(self) -> bool:
        """Every node had been told to commit and has acted on it."""
        found = []
        for manager in self.course.target.managers:
            try:
                found.append(manager.decided(self.course.lease) == "commit" and manager.read_change().trial is None)
            except Unreachable:
                return False
        return all(found)

    def _serve_again(self, away: dict[str, str]) -> bool:
        """Every group that can be reached whole runs what is configured now. Only groups that may run the change are
        restarted; when none was, what runs is looked at."""
        course = self.course
        touched = course.touched()
        for group in touched or course.target.groups:
            if any(manager.name in away for manager in group.managers):
                continue
            adopted = not touched or self._went_back_already(group)
            if adopted:
                course.frozen |= {manager.name: manager.snapshot() for manager in group.managers}
            else:
                course.cycle(group, "revert: ", strict=False)
            start = len(self.checks)
            proven = self._prove(group)
            if not proven and self._dead_man_was_quicker(group):
                del self.checks[start:]
                proven = self._prove(group)
            if not proven and adopted and touched:
                del self.checks[start:]
                course.talk("what the dead-man started does not serve: starting it again")
                course.cycle(group, "revert: ", strict=False)
                proven = self._prove(group)
            if not proven:
                return False
            course.drains.back_or_tell(group)
        for group in course.target.groups:  # one that was taken out and never stopped
            course.drains.back_or_tell(group)
        return True

    def _went_back_already(self, group: Target) -> bool:
        """Every member was reverted and started again by its own dead-man, and runs the revert target: another restart
        would only cost service."""
        course = self.course
        for manager in group.managers:
            token, at_utc = manager.reverted()
            if token != course.lease.token or not manager.snapshot().running:
                return False
            if not flags.same_command(course.baseline.services[manager.name].argv, manager.argv()):
                return False
            course.talk(f"{manager.name}: its dead-man went back at {at_utc or 'an unknown time'}; what it started is proven as it is")
        return True

    def _prove(self, group: Target) -> bool:
        course = self.course
        expected = Expectation(course.baseline.digest, course.baseline.services, course.expected.known_exceptions)
        proof = course.proof(group, expected, None, _ANSWERED)
        found = []
        for check in (proof.boot(course.plan.times.revert_boot_s), *proof.serving()):
            found.append(check)
            self.checks.append(check)
            course.talk(f"revert: {check.name}: {check.outcome}: {check.evidence}")
        good = checks.proven(found)
        if good:
            course.note_boot(found[0], course.baseline.digest, f"revert of {course.journal.id}")
        return good

    def _dead_man_was_quicker(self, group: Target) -> bool:
        """It restarts what it reverts, which ends the start that was being proven: look at the start that runs now."""
        course = self.course
        now = {manager.name: manager.snapshot() for manager in group.managers}
        moved = any(now[name].invocation_id != course.frozen[name].invocation_id and now[name].restarts == 0 for name in now)
        course.frozen |= now
        return moved

    def stuck(self, why: str) -> State:
        course = self.course
        course.talk(f"STUCK: {why}")
        course.note(State.stuck, why)
        course.mark("stuck")
        course.tell("STUCK", f"{why}\nIt is not known that anybody is served. Look at it now: opsctl rollout status")
        return State.stuck
