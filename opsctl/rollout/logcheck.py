"""What the log of a start proves: that nothing new went wrong, or nothing at all where lines of it are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opsctl.rollout.checks import Check, failed, inconclusive, passed
from opsctl.rollout.traces import exception, tracebacks
from opsctl.service.manager import Line

Logs = Mapping[str, Sequence[Line]]  # the lines of one start, by the name of the service


def clean(logs: Logs, known: frozenset[str]) -> Check:
    """No traceback whose exception's class is not ``known``. Where lines are lost, one may have been among them."""
    fresh = [trace for lines in logs.values() for trace in tracebacks(lines) if exception(trace) not in known]
    if fresh:
        return failed("log", f"{len(fresh)} new tracebacks in the log of this start", tracebacks=fresh)
    if missing := gap(logs):
        return inconclusive("log", f"no new traceback in this start's log, of which lines are lost: {missing}", gap=missing)
    return passed("log", "no new traceback in the log of this start")


def gap(logs: Logs) -> str:
    """Where lines are lost, in the words of who lost them; empty when none are known to be."""
    return "; ".join(f"{name}: {lost[-1]}" for name, lines in logs.items() if (lost := [line.text for line in lines if line.lost]))
