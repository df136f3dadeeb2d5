"""The two loops, over the same parts.

``SequentialLoop`` does one thing after another. ``OverlapLoop`` prepares step N+1 while the device computes step N,
and turns N's results into answers while the device computes N+1. What was prepared is trimmed by what N's results
say (finished rows leave) before it is sent: rank 0 sends a step only when it has the last one's result, so a
collective that one rank skipped shows as a wedge and never as an answer computed from the wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.scheduler.results import Launched
from engine.scheduler.scheduler import Scheduler


class Loop(Protocol):
    def turn(self) -> bool:
        """One turn; False when there was nothing to do and nothing is on its way."""
        ...


class SequentialLoop:
    name = "sequential"

    def __init__(self, scheduler: Scheduler, receive: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._receive = receive

    def turn(self) -> bool:
        self._receive()
        plan = self._scheduler.plan(settled=True)
        if plan is None:
            return False
        launched = self._scheduler.launch(plan)
        self._scheduler.process(launched, self._scheduler.collect(launched))
        return True


class OverlapLoop:
    name = "overlap"

    def __init__(self, scheduler: Scheduler, receive: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._receive = receive
        self._pending: Launched | None = None

    def turn(self) -> bool:
        scheduler, pending = self._scheduler, self._pending
        self._receive()
        plan = scheduler.plan(settled=pending is None)
        if pending is None:
            self._pending = scheduler.launch(plan) if plan else None
            return plan is not None
        results = scheduler.collect(pending)
        trimmed = plan.without(results.finished) if plan else None
        self._pending = scheduler.launch(trimmed) if trimmed else None
        scheduler.process(pending, results)
        return True
