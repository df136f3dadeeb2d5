"""What a check answers. Nothing measured is never a pass."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from opsctl.rollout.probe import ApiError
from opsctl.rollout.watch import Alarm, Crash, Watch
from opsctl.service.manager import ServiceError
from opsctl.service.wait import Deadline

_BEHIND_S = 1.0  # how long after a failure the service manager may take to say that the process has ended


class Outcome(enum.StrEnum):
    passed = "passed"
    failed = "failed"
    inconclusive = "inconclusive"  # could not be told either way
    error = "error"  # the check itself did not work


class Check(msgspec.Struct, frozen=True):
    """One check's answer. ``evidence`` is for people, ``data`` the same for programs."""

    name: str
    outcome: Outcome
    evidence: str
    data: dict[str, Any] = {}


def passed(name: str, evidence: str, **data: Any) -> Check:
    return Check(name, Outcome.passed, evidence, data)


def failed(name: str, evidence: str, **data: Any) -> Check:
    return Check(name, Outcome.failed, evidence, data)


def inconclusive(name: str, evidence: str, **data: Any) -> Check:
    return Check(name, Outcome.inconclusive, evidence, data)


def run(name: str, check: Callable[[], Check], watch: Watch | None = None) -> Check:
    """A check with what it may raise turned into an answer: a crash, an alarm, a missed deadline and an API that gives
    no answer are failures; a service manager that cannot be asked is an error of the check. With ``watch`` a crash behind
    a failure is looked for, so that its traceback is in the answer."""
    try:
        found = check()
    except Crash as crash:
        return Check(name, Outcome.failed, str(crash), crash.evidence)
    except (ApiError, Alarm, Deadline) as error:
        found = Check(name, Outcome.failed, str(error))
    except (ServiceError, OSError) as error:
        return Check(name, Outcome.error, str(error))
    if watch is None or found.outcome is not Outcome.failed:
        return found
    try:
        behind = watch.crash_behind(_BEHIND_S)
    except (ServiceError, OSError):  # the failure itself is known
        return found
    return found if behind is None else Check(name, Outcome.failed, str(behind), {**found.data, **behind.evidence})


def proven(checks: Iterable[Check]) -> bool:
    """Whether they show that a configuration which was verified before, or runs already, serves: each has passed, or could
    not be told for nothing but lines that the log has lost (``gap`` in its data). Of a change that is not enough."""
    found = tuple(checks)
    return bool(found) and all(c.outcome is Outcome.passed or (c.outcome is Outcome.inconclusive and "gap" in c.data) for c in found)


def overall(checks: Iterable[Check]) -> Outcome:
    """The worst of them; inconclusive when there are none."""
    found = {check.outcome for check in checks}
    for outcome in (Outcome.failed, Outcome.error, Outcome.inconclusive):
        if outcome in found:
            return outcome
    return Outcome.passed if found else Outcome.inconclusive
