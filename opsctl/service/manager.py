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
    ready_mono: float = 0.0  # when it said that it is ready, on the clock of ``since_mono``; 0: not, or it does not say
    container_id: str = ""  # of the container that the service runs, where it runs one: a second key of the start
    status: str = ""  # what it says of itself (sd_notify's STATUS=), a boot's progress

    @property
    def running(self) -> bool:
        return self.state in (State.active, State.activating) and self.main_pid > 0


@dataclass(frozen=True)
class Line:
    """One line of a service's log. ``manager``: written by the service manager about the service. ``lost``: it says
    that lines before it are missing (a rate limit, a full disk), so that what is not there proves nothing."""

    text: str
    pid: int = 0
    manager: bool = False
    lost: bool = False


@dataclass(frozen=True)
class UnitFile:
    """A unit file that came with an override, and the one that it took the place of, by the names that their bytes are
    kept under (``keep_file``); ``was`` is empty where there was none of the administrator's own."""

    name: str
    was: str = ""


@dataclass(frozen=True)
class Override:
    """A command line that replaces the one of the service's definition, and variables that are added to it.

    ``mounts``: files of the machine that the service sees in the place of others (path as it sees it -> what is there
    instead), read-only. ``unit``: the unit file that belongs to it, None where the unit's own file was left alone."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    unit: UnitFile | None = None


@dataclass(frozen=True)
class UnitSource:
    """What a unit is made of. ``files``: its own file, then its drop-ins in the order in which they apply, path and
    text of each; ``ours``: those of them that opsctl wrote. ``path``: where a file of the administrator's own lies or
    would lie, ``own`` its name as ``UnitFile.was`` gives it; ``trial``: what hides it while a rollout decides. ``folders``:
    what specifiers such as ``%C`` stand for, as far as that is the same on every machine."""

    files: tuple[tuple[str, str], ...]
    ours: frozenset[str]
    path: str
    own: str
    trial: str
    folders: Mapping[str, str] = field(default_factory=dict)


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
    mounts: Mapping[str, str] = field(default_factory=dict)  # by the overrides
    unit: str = ""  # the unit file that came with the overrides, as ``UnitFile.name``


@dataclass(frozen=True)
class Lease:
    """A dead-man's terms.

    ``token`` says whose it is; ``ttl_s`` how long it lives without renewal. ``decision`` is a file that services of
    one machine share (empty: the service has its own), see ``ServiceManager.decide``. When it ends by itself the
    machine pages: by ``on_expiry``, a command, where opsctl runs on that machine, else it tells ``pages`` (apprise
    URLs) itself, under ``title``.
    """

    token: str
    ttl_s: float
    decision: str = ""
    on_expiry: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    title: str = ""


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

    def image(self) -> str:
        """The container image that the service's command runs; empty when it runs none."""
        ...

    def has_image(self, name: str) -> bool: ...

    def run_dir(self) -> str:
        """Where the service keeps its black boxes, as far as its definition says; empty when it does not."""
        ...

    def preflight(self) -> tuple[str, ...]:
        """Reasons why this service must not be changed by a rollout; empty when there are none."""
        ...

    def stop_limit_s(self) -> float:
        """How long its manager lets it take to stop before it kills it; 0 when that is not known."""
        ...

    def committed_file(self, override: Override | None) -> tuple[str, str]:
        """(path, text) of the file that makes an override last, as a commit would write it; no text for None."""
        ...

    def trial_path(self) -> str:
        """Where a trial is kept while a rollout decides."""
        ...

    def unit_source(self) -> UnitSource:
        """Raises ServiceError where there are no unit files, or where this one cannot be replaced."""
        ...

    def check_unit(self, text: str) -> tuple[tuple[str, ...], str]:
        """What its service manager finds wrong with a unit file that would be this service's, one line each, and why
        it could not be asked (empty: it was)."""
        ...

    def keep_file(self, name: str, data: bytes) -> None:
        """Put a file where ``kept_path(name)`` says, whole; it outlives a reboot."""
        ...

    def kept_path(self, name: str) -> str: ...

    def pids(self) -> tuple[int, ...]:
        """Every process of the service that lives now, as its machine numbers them."""
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

    def prepare_commit(self, lease: Lease) -> None:
        """Do whatever of a commit can fail for want of room or rights, and say so by returning: the commit itself is
        then a rename. Raises LeaseLost when the dead-man is not ours (any more)."""
        ...

    def commit_trial(self) -> None:
        """The trial becomes the committed override. Nothing happens when there is no trial."""
        ...

    def withdraw(self, lease: Lease) -> bool:
        """Turn a decision to commit into one to revert, as long as nothing acted on it: true when it now is one."""
        ...

    def restore(self, override: Override | None) -> None:
        """Make this the committed override, whatever is there, and drop the trial; None: neither is left."""
        ...

    def remove_trial(self) -> None: ...

    def reverted(self) -> tuple[str, str]:
        """The rollout that a dead-man reverted here last since the machine's boot, and when (UTC); both empty for none."""
        ...

    def set_undrain(self, argv: tuple[str, ...], deadline_s: float) -> None:
        """What a dead-man on the machine runs once the service is active again: it puts it back into its router. Nothing
        for an empty one."""
        ...

    def owed(self) -> tuple[str, ...]:
        """Pages (title, then text) that a dead-man of this machine's could not get out, for any of its services."""
        ...

    def forget_owed(self) -> None:
        """They went out after all."""
        ...

    def log(self, invocation_id: str, *, last_s: float | None = None) -> tuple[Line, ...]:
        """Every line of one invocation, the manager's own about it included, oldest first. With ``last_s`` older lines may
        be left out, which is what makes a start of weeks readable; there may be more of them, never fewer."""
        ...

    def read_file(self, path: str) -> bytes:
        """A file on the service's machine. Raises FileNotFoundError."""
        ...

    def run(self, argv: tuple[str, ...], deadline_s: float) -> tuple[int, str, str]:
        """A short command on the service's machine in the service's own environment: exit status, output, errors."""
        ...
