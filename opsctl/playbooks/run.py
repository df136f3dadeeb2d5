"""Carrying a playbook out: what must hold is checked, the steps are done in order, each under its deadline, what undoes
them is done whatever happened, and what must hold is checked again.

Once a step has acted, the rollbacks run: after a success those that say so, after a failure or an interrupt all of them.
They run whatever went wrong, also where the record can no longer be written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from monitors.exit_codes import ExitCode
from opsctl.playbooks import actions
from opsctl.playbooks.actions import Place
from opsctl.playbooks.journal import Record, StepResult, utc
from opsctl.playbooks.process import end_in
from opsctl.playbooks.schema import Expectation, Playbook, Step
from opsctl.playbooks.tolerances import hurried
from opsctl.rollout.checks import Check, Outcome, overall
from opsctl.rollout.result import Page

_HURRIED_S = 5.0
_TOLD = (ExitCode.REVERTED, ExitCode.STUCK, ExitCode.HELD, ExitCode.LOCKED, ExitCode.UNREACHABLE, ExitCode.FOUND)
"""Exit codes of a step that say more than that it failed: the playbook ends with the same."""


class Server(Protocol):
    """The deployment, as far as a playbook touches it itself."""

    def check(self, one: Expectation) -> Check: ...

    def arm(self, spec: str, deadline_s: float) -> None:
        """Raises OSError when the fault was not taken."""
        ...

    def lift(self) -> str:
        """Lift every fault. Empty, or why it could not be done."""
        ...

    def page(self, title: str, body: str, key: str) -> Page: ...


@dataclass(frozen=True)
class Hands:
    """What a run acts with. ``agree`` says who approved a step, empty when nobody has; ``keep`` writes the record down."""

    server: Server
    agree: Callable[[Step, str], str]
    keep: Callable[[Record], None]
    talk: Callable[[str], None]
    now: Callable[[], float] = time.time
    grace_s: float = 60.0


def run(playbook: Playbook, place: Place, hands: Hands, record: Record, *, incident: bool = False) -> ExitCode:
    """Returns how it ended; ``record`` holds the rest. ``incident``: somebody has seen what it responds to, whatever its probes
    see. Raises OSError when no record can be kept: nothing was touched then."""
    hands.keep(record)
    lost: list[str] = []
    hands = replace(hands, keep=_if_it_can(hands, lost))
    must_hold = playbook.gate == "holds"
    # Where it is only told, it must not hold up what is urgent: a wedged server answers no probe at all.
    before = playbook.hypothesis if must_hold else [hurried(one, _HURRIED_S) for one in playbook.hypothesis]
    record.before = _checked(before, hands, "before")
    hands.keep(record)
    if must_hold and record.before and overall(record.before) is not Outcome.passed:
        return _ended(record, hands, "not begun", f"the steady state does not hold: {_first_bad(record.before)}", ExitCode.FOUND)
    if playbook.gate == "fails" and not incident and overall(record.before) is Outcome.passed:
        return _ended(record, hands, "not begun", "all is well here, and this is for when it is not; to do it all the same: --incident",
                      ExitCode.USAGE)  # fmt: skip
    acted, code, interrupted = False, ExitCode.DONE, False
    armed, broke = False, ""
    try:
        for step in playbook.method:
            if code is not ExitCode.DONE:
                record.method.append(_skipped(step, place, playbook))
                continue
            who = hands.agree(step, actions.told(step, place, playbook.name)) if step.approval else "-"
            if not who:
                record.method.append(StepResult(step.name, step.action, actions.told(step, place, playbook.name), "held",
                                                why=f"needs approval: give it with --approve {step.approval}"))  # fmt: skip
                code = ExitCode.HELD
                continue
            acted = True
            armed = armed or bool(step.fault)
            found = _done(step, place, playbook, hands, record, who)
            record.method.append(found)
            hands.keep(record)
            if found.outcome != "passed" and not step.page:  # a page that does not go out is told, and holds nothing up
                code = ExitCode(found.exit_code) if found.exit_code in _TOLD else ExitCode.FOUND
    except KeyboardInterrupt:
        code, interrupted = ExitCode.INTERRUPTED, True
    except Exception as error:  # whatever it is, what was done is undone before it is told
        code, broke = ExitCode.INTERNAL, f"{type(error).__name__}: {error}"
    undone = _undo(playbook, place, hands, record, failed=code is not ExitCode.DONE, acted=acted, armed=armed)
    try:
        record.after = _checked(playbook.expected if acted else (), hands, "after")
    except KeyboardInterrupt:
        code, interrupted = ExitCode.INTERRUPTED, True
    if not undone:
        return _ended(record, hands, "stuck", "a rollback failed: look now", ExitCode.STUCK)
    if interrupted:
        return _ended(record, hands, "interrupted", f"interrupted; {'the rollbacks have run' if acted else 'nothing was done'}", code)
    if broke:
        return _ended(record, hands, "failed", broke, code)
    holds = not record.after or overall(record.after) is Outcome.passed
    if code is not ExitCode.DONE:
        stopped = next(step for step in record.method if step.outcome in ("failed", "held") and step.action != "page")
        why = f"{stopped.name}: {stopped.why}"
        if code is ExitCode.HELD:
            return _ended(record, hands, "held", why, code)
        if code is ExitCode.FOUND and record.rollbacks and holds:
            return _ended(record, hands, "rolled back", why, ExitCode.REVERTED)
        return _ended(record, hands, "failed", why, code)
    if not holds:
        return _ended(record, hands, "failed", f"what must hold does not: {_first_bad(record.after)}", ExitCode.FOUND)
    unpaged = record.page_sent is False
    why = f"its record could not be written: {lost[-1]}" if lost else ""
    return _ended(record, hands, "done", why, ExitCode.INTERNAL if unpaged or lost else ExitCode.DONE)


def _if_it_can(hands: Hands, lost: list[str]) -> Callable[[Record], None]:
    """Keeps the record where it can: a disk that is full by now must not end what has begun. ``lost`` gets why it could not."""

    def keep(record: Record) -> None:
        try:
            hands.keep(record)
        except OSError as error:
            if not lost:
                hands.talk(f"the record cannot be written, and the playbook goes on: {error}")
            lost.append(str(error))

    return keep


def _undo(playbook: Playbook, place: Place, hands: Hands, record: Record, *, failed: bool, acted: bool, armed: bool) -> bool:
    """Run the rollbacks that are due, and lift faults. False when one of them failed; the others run all the same."""
    good = True
    if armed:
        try:
            why = hands.server.lift()
        except KeyboardInterrupt:
            why = "interrupted"
        record.rollbacks.append(StepResult("lift-faults", "fault", "lift all faults", "failed" if why else "passed", why=why))
        good = not why
    for step in playbook.rollbacks:
        if not acted or (step.when == "failed" and not failed):
            record.rollbacks.append(_skipped(step, place, playbook))
            continue
        try:
            found = _done(step, place, playbook, hands, record, "-")  # whoever agreed to the change agreed to its undoing
        except KeyboardInterrupt:
            found = StepResult(step.name, step.action, actions.told(step, place, playbook.name), "interrupted")
        except OSError as error:
            found = StepResult(step.name, step.action, actions.told(step, place, playbook.name), "failed", why=str(error))
        record.rollbacks.append(found)
        hands.keep(record)
        good = good and found.outcome == "passed"
    return good


def _done(step: Step, place: Place, playbook: Playbook, hands: Hands, record: Record, who: str) -> StepResult:
    told = actions.told(step, place, playbook.name)
    hands.talk(f"{step.name}: {told} (at most {step.deadline_s:g} s)")
    began, begun = utc(hands.now()), time.monotonic()

    def result(outcome: str, why: str = "", code: int | None = None, said: str = "") -> StepResult:
        hands.talk(f"{step.name}: {outcome}{f', {why}' if why else ''}")
        spent = round(time.monotonic() - begun, 3)
        return StepResult(step.name, step.action, told, outcome, began, spent, code, why, said, who)

    if step.fault:
        try:
            hands.server.arm(step.fault, step.deadline_s)
        except OSError as error:
            return result("failed", str(error))
        return result("passed")
    if step.page:
        page = hands.server.page(f"{place.deployment}: {playbook.name}", step.page, record.id)
        record.page_sent = bool(page.sent) and record.page_sent is not False
        return result("passed") if page.sent else result("failed", page.reason or "the page did not go out", ExitCode.INTERNAL)
    ran = end_in(actions.executable(actions.words(step, place, playbook.name)), step.deadline_s, env=place.env, grace_s=hands.grace_s,
                 talk=lambda text: hands.talk(f"{step.name}: {text}"))  # fmt: skip
    if ran.code in step.expects:
        return result("passed", ran.ending if ran.code else "", ran.code, ran.said)
    return result("failed", f"{ran.ending}{_told_by(ran.said)}", ran.code, ran.said)


def _told_by(said: str) -> str:
    """The first error of the envelope that a command of ours printed, else its last line."""
    for line in reversed(said.splitlines()):
        try:
            errors = json.loads(line)["errors"]
        except (ValueError, LookupError, TypeError):
            continue
        return f": {errors[0]['message']}" if errors else ""
    return f": {said.splitlines()[-1][:200]}" if said else ""


def _checked(expected: Sequence[Expectation], hands: Hands, when: str) -> list[Check]:
    found = []
    for one in expected:
        check = hands.server.check(one)
        hands.talk(f"{when}: {check.name} {check.outcome}: {check.evidence}")
        found.append(check)
    return found


def _skipped(step: Step, place: Place, playbook: Playbook) -> StepResult:
    return StepResult(step.name, step.action, actions.told(step, place, playbook.name), "skipped")


def _first_bad(checks: Sequence[Check]) -> str:
    bad = next(check for check in checks if check.outcome is not Outcome.passed)
    return f"{bad.name} {bad.outcome}: {bad.evidence}"


def _ended(record: Record, hands: Hands, outcome: str, why: str, code: ExitCode) -> ExitCode:
    record.outcome, record.why, record.ended_utc = outcome, why, utc(hands.now())
    hands.keep(record)
    return code
