"""What a check answers. Nothing measured is never a pass."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from opsctl.rollout.probe import ApiError
from opsctl.rollout.watch import Crash
from opsctl.service.manager import ServiceError
from opsctl.service.wait import Deadline


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


def run(name: str, check: Callable[[], Check]) -> Check:
    """A check with what it may raise turned into an answer: a crash, a missed deadline and an API that gives no
    answer are failures; a service manager that cannot be asked is an error of the check."""
    try:
        return check()
    except Crash as crash:
        return Check(name, Outcome.failed, str(crash), crash.evidence)
    except (ApiError, Deadline) as error:
        return Check(name, Outcome.failed, str(error))
    except (ServiceError, OSError) as error:
        return Check(name, Outcome.error, str(error))


def overall(checks: Iterable[Check]) -> Outcome:
    """The worst of them; inconclusive when there are none."""
    found = {check.outcome for check in checks}
    for outcome in (Outcome.failed, Outcome.error, Outcome.inconclusive):
        if outcome in found:
            return outcome
    return Outcome.passed if found else Outcome.inconclusive
