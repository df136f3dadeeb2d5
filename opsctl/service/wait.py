"""Waiting for services. Every wait has a deadline, says what it waits for, and notices what it did not wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opsctl.service import together
from opsctl.service.manager import ServiceError, ServiceManager, Snapshot, State

POLL_S = 0.2
SAY_EVERY_S = 8.0


class Deadline(ServiceError):
    """Something did not happen in time."""


class Clock(Protocol):
    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@dataclass
class Waiter:
    """How to wait: the clock, where progress is told, and what else must be done meanwhile (a lease renewed)."""

    talk: Callable[[str], None] = lambda text: None
    meanwhile: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=lambda: time)
    poll_s: float = POLL_S
    say_every_s: float = SAY_EVERY_S
    detail: Callable[[], str] = lambda: ""  # added to what is said: how far it is, by its own word

    def until(self, what: str, done: Callable[[], bool], deadline_s: float) -> None:
        """Poll ``done``. Raises Deadline, and whatever ``done`` or ``meanwhile`` raise."""
        start = self.clock.monotonic()
        said = start
        self.meanwhile()  # a row of waits that all end at once must not starve it
        while not done():
            self.meanwhile()
            now = self.clock.monotonic()
            if now - start >= deadline_s:
                raise Deadline(f"{what}: not within {deadline_s:g} s")
            if now - said >= self.say_every_s:
                said = now
                detail = self.detail()
                left = f"{now - start:.0f} s so far, {deadline_s - (now - start):.0f} s left"
                self.talk(f"waiting for {what}: {left}{f' ({detail})' if detail else ''}")
            self.clock.sleep(min(self.poll_s, max(0.0, deadline_s - (now - start))))


def stop(services: Sequence[ServiceManager], waiter: Waiter, deadline_s: float) -> None:
    """Stop all, then wait for all: the members of one group go down together. Raises Deadline."""
    for service in services:
        service.begin_stop()
    names = ", ".join(service.name for service in services)
    waiter.until(f"{names} to stop", lambda: all(map(stopped, together.snapshots(services).values())), deadline_s)


def stopped(snapshot: Snapshot) -> bool:
    return snapshot.state in (State.inactive, State.failed) and not snapshot.main_pid


def start(services: Sequence[ServiceManager], waiter: Waiter, deadline_s: float) -> dict[str, Snapshot]:
    """Start all and wait until each has a main process of a new invocation. Ready is another matter.

    Returns the first snapshot of each new invocation. Raises Deadline.
    """
    before = {name: found.invocation_id for name, found in together.snapshots(services).items()}
    for service in services:
        service.begin_start()
    begun: dict[str, Snapshot] = {}

    def all_begun() -> bool:
        for name, found in together.snapshots([service for service in services if service.name not in begun]).items():
            if found.invocation_id and found.invocation_id != before[name]:
                begun[name] = found
        return len(begun) == len(services)

    waiter.until(f"{', '.join(before)} to begin a new start", all_begun, deadline_s)
    return begun
