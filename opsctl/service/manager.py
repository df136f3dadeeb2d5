"""What a rollout needs of a service manager, whichever it is.

A service is one supervised command. Each start of it is an *invocation* with an id of its own (32 hex digits), which
the command finds in ``INVOCATION_ID``; everything that is read about a start (lines, process, state) is asked for by
that id, never by time of day.

A change of the command line lives in two places. The *committed* override survives a reboot; the *trial* override
hides it, does not survive a reboot, and exists only while a rollout is deciding. Removing the trial is the revert.
A *lease* is the dead-man: unless it is renewed, the service's own machine removes the trial and restarts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class ServiceError(Exception):
    """Something about a service that a person must look at. The text names the service and what to do."""


class Unreachable(ServiceError):
    """The service's machine or its manager did not answer in time."""


class Locked(ServiceError):
    """Another rollout holds this service."""


class LeaseLost(ServiceError):
    """The lease is no longer ours: it ended, and the service's machine has reverted or is about to."""


class State(enum.StrEnum):
    inactive = "inactive"
    activating = "activating"  # started and not yet ready, or waiting to be restarted
    active = "active"
    deactivating = "deactivating"
    failed = "failed"


@dataclass(frozen=True)
class Snapshot:
    """One reading of a service. ``restarts`` counts automatic restarts; ``since_mono`` is when the main process
    started (CLOCK_MONOTONIC of the service's machine, seconds; 0 when it never did)."""

    invocation_id: str
    state: State
    main_pid: int
    restarts: int
    result: str  # "success", or why the last start ended: exit-code, signal, timeout, watchdog
    since_mono: float
    waiting_to_restart: bool = False

    @property
    def running(self) -> bool:
        return self.state in (State.active, State.activating) and self.main_pid > 0


@dataclass(frozen=True)
class Line:
    """One line of a service's log. ``manager``: written by the service manager about the service."""

    text: str
    pid: int = 0
    manager: bool = False


@dataclass(frozen=True)
class Override:
    """A command line that replaces the one of the service's definition, and variables that are added to it."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """What overrides the definition of a service at present. The trial, if there is one, wins."""

    committed: Override | None = None
    trial: Override | None = None


@dataclass(frozen=True)
class Command:
    """What the next start would run: the definition with its overrides."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # set by the definition and the overrides; not the inherited environment


@dataclass(frozen=True)
class Lease:
    """A dead-man's terms.

    ``token`` says whose it is; ``ttl_s`` how long it lives without renewal. ``decision`` is a file that services of
    one machine share (empty: the service has its own), see ``ServiceManager.decide``. ``on_expiry`` is a command that
    the machine runs after it reverted by itself (the page).
    """

    token: str
    ttl_s: float
    decision: str = ""
    on_expiry: tuple[str, ...] = ()


class ServiceManager(Protocol):
    """One service. Methods that talk to the manager raise Unreachable when it does not answer in time and
    ServiceError when it refuses; none waits for the service itself (see ``wait.py``)."""

    @property
    def name(self) -> str:
        """Unique in a deployment."""
        ...

    @property
    def node(self) -> str:
        """The machine it runs on, for messages."""
        ...

    def snapshot(self) -> Snapshot: ...

    def argv(self) -> tuple[str, ...]:
        """The main process's own argument vector, read from /proc; empty when it cannot be known."""
        ...

    def command(self) -> Command: ...

    def run_dir(self) -> str:
        """Where the service keeps its black boxes, as far as its definition says; empty when it does not."""
        ...

    def preflight(self) -> tuple[str, ...]:
        """Reasons why this service must not be changed by a rollout; empty when there are none."""
        ...

    def begin_start(self) -> None: ...

    def begin_stop(self) -> None: ...

    def read_change(self) -> Change: ...

    def arm(self, lease: Lease) -> None:
        """Start (or lengthen) the dead-man. Raises Locked when another token holds the service."""
        ...

    def renew(self, token: str, ttl_s: float) -> None:
        """Raises LeaseLost."""
        ...

    def disarm(self, token: str) -> None:
        """End the dead-man without a revert. Nothing happens when the token holds nothing."""
        ...

    def lease_token(self) -> str:
        """Who holds the service; empty when nobody does."""
        ...

    def decide(self, lease: Lease, wish: str) -> str:
        """Settle how the rollout of this lease ends: ``"commit"`` or ``"revert"``. The first to decide wins, be it
        the operator or the dead-man, and both get the winner. Never changes afterwards."""
        ...

    def decided(self, lease: Lease) -> str:
        """What was settled; empty when nothing was."""
        ...

    def write_trial(self, override: Override) -> None:
        """Takes effect at the next start."""
        ...

    def commit_trial(self) -> None:
        """The trial becomes the committed override. Nothing happens when there is no trial."""
        ...

    def remove_trial(self) -> None: ...

    def log(self, invocation_id: str) -> tuple[Line, ...]:
        """Every line of one invocation, the manager's own about it included, oldest first."""
        ...

    def read_file(self, path: str) -> bytes:
        """A file on the service's machine. Raises FileNotFoundError."""
        ...

    def run(self, argv: tuple[str, ...], deadline_s: float) -> tuple[int, str, str]:
        """A short command on the service's machine in the service's own environment: exit status, output, errors."""
        ...
