"""The stability window: nothing may happen in it. No restart, no alarm of the hang monitor, no exception of a new kind,
only good answers, and clients that ask as often as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from opsctl.callers import path, traffic
from opsctl.callers.traffic import Rates
from opsctl.rollout import checks
from opsctl.rollout.checks import Check, Outcome
from opsctl.rollout.scope import Scope
from opsctl.rollout.sentry import Sentry
from opsctl.rollout.watch import Alarm, Watch
from opsctl.service.wait import Waiter

CANARIES = 6  # completions in a window
_JUDGE_S = 30.0  # how long a verdict is waited for when a stall was declared in the window


def steady(
    window_s: float, watch: Watch, waiter: Waiter, *, answer: Callable[[], None], log: Callable[[], Check], texts: Callable[[], list[str]],
    sentry: Sentry | None, scope: Scope | None,
) -> Check:  # fmt: skip
    """``answer`` asks one canary and raises when it is no good; ``log`` looks for new exceptions; ``texts`` are the lines of
    this start. Raises Crash, Deadline, ApiError."""
    clock = waiter.clock
    start, good = clock.monotonic(), 0
    counted = traffic.counts(texts()) if scope else {}

    def quiet(until: float) -> bool:
        if sentry is not None and (alarm := sentry.alarm()):
            raise Alarm(alarm)
        return clock.monotonic() >= until

    with contextlib.suppress(Alarm):
        while True:
            answer()
            good += 1
            found = log()
            if found.outcome is not Outcome.passed:
                return found
            elapsed = clock.monotonic() - start
            if elapsed >= window_s:
                break
            pause = min(window_s / CANARIES, window_s - elapsed)
            until = clock.monotonic() + pause
            watch.until(f"the stability window ({good} good answers)", lambda until=until: quiet(until), pause + 60)  # type: ignore[misc]
    data = {"answers": good, "seconds": window_s}
    if sentry is not None:
        if sentry.deciding():
            watch.until("the hang monitor's verdict", lambda: not sentry.deciding() or bool(sentry.alarm()), _JUDGE_S)
        if alarm := sentry.alarm():
            return checks.failed("steady", alarm, **data)
        if sentry.grown:
            told = ", ".join(f"{name} by {by:g}" for name, by in sentry.grown.items())
            return checks.failed("steady", f"counters of errors grew: {told}", **data)
    fallen = _fallen(scope, counted, texts, clock.monotonic() - start) if scope else []
    if fallen:
        return checks.inconclusive("steady", "; ".join(one.text for one in fallen), collapsed=[one.caller for one in fallen], **data)
    if sentry is not None and (why := sentry.blind()):
        return checks.inconclusive("steady", why, **data)
    armed = ", no alarm of the hang monitor" if sentry is not None else ""
    return checks.passed("steady", f"{good} good answers, no restart{armed} in {window_s:g} s", **data)


def _fallen(scope: Scope, before: Mapping[str, int], texts: Callable[[], list[str]], seconds: float) -> list[traffic.Collapse]:
    """Clients that asked before the change and have all but stopped in the window."""
    rates: Rates = scope.before.rates if scope.before else Rates()
    now = traffic.counts(texts())
    seen = {caller: now[caller] - before.get(caller, 0) for caller in now}
    return traffic.collapses(rates, seen, seconds, names(scope))


def names(scope: Scope) -> dict[str, str]:
    """Callers' names by how the log calls them, those whose key cannot be read left out."""
    found = {}
    for caller in scope.callers:
        with contextlib.suppress(OSError):
            found[traffic.hash_of(caller, path.key_of(caller))] = caller.name
    return {key: name for key, name in found.items() if key}
