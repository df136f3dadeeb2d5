"""The files of an embedded service, each written whole (temporary file, fsync, rename).

::

    RUN_DIR/.supervisor/state.json    what the supervisor last knew; readable when the supervisor is dead
    RUN_DIR/.supervisor/trial.json    the trial override
    RUN_DIR/.supervisor/lease.json    the dead-man's terms, with its end
    RUN_DIR/.supervisor/control       the supervisor's socket
    RUN_DIR/.supervisor/lock          held by the supervisor for its whole life
    STATE_DIR/NAME.committed.json     the committed override

RUN_DIR is gone after a reboot, and the trial with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from opsctl.service.definition import Definition
from opsctl.service.manager import Override, ServiceError, State

_T = TypeVar("_T")


class OverrideRecord(msgspec.Struct, frozen=True):
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    mounts: dict[str, str] = {}

    @classmethod
    def of(cls, override: Override) -> OverrideRecord:
        return cls(override.argv, dict(override.env), dict(override.mounts))

    def override(self) -> Override:
        return Override(self.argv, self.env, self.mounts)


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    until_mono: float
    ttl_s: float
    decision: str = ""
    on_expiry: tuple[str, ...] = ()
    touched: bool = False  # a trial was written under it, or it was stopped: the dead-man has to start it again


class Span(msgspec.Struct):
    """Bytes of the log that belong to one invocation; ``end`` is -1 while it is being written."""

    invocation_id: str
    start: int
    end: int = -1


class ServiceRecord(msgspec.Struct, kw_only=True):
    """What the supervisor knows. ``leader`` is the session that it started last (0: none, or seen empty), with its
    start in clock ticks: after its own violent death the next supervisor ends what is left of it. ``ordered`` is the start
    that was told to stop last, which a monitor takes for no crash; ``ordered_by`` the rollout whose dead-man did it, empty
    for a person."""

    name: str
    supervisor_pid: int
    invocation_id: str = ""
    state: State = State.inactive
    main_pid: int = 0
    restarts: int = 0
    result: str = "success"
    since_mono: float = 0.0
    ready_mono: float = 0.0
    waiting_to_restart: bool = False
    status: str = ""
    boot_id: str = ""
    leader: int = 0
    leader_started: int = 0
    spans: list[Span] = []
    reverted_by_deadman: str = ""
    reverted_at_utc: str = ""
    ordered: str = ""
    ordered_by: str = ""


class Folder:
    """Paths of one service."""

    def __init__(self, definition: Definition, env: Mapping[str, str]) -> None:
        private = Path(definition.run_dir) / ".supervisor"
        base = env.get("STATE_DIRECTORY") or Path(env.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "opsctl"
        self.private = private
        self.state = private / "state.json"
        self.trial = private / "trial.json"
        self.lease = private / "lease.json"
        self.control = private / "control"
        self.notify = private / "notify"
        self.lock = private / "lock"
        self.committed = Path(base) / "services" / f"{definition.name}.committed.json"
        self.staged = self.committed.with_name(f".{definition.name}.staged.json")
        self.kept = Path(base) / "kept"

    def decision(self, token: str) -> Path:
        return self.private / f"decision-{token}"


def write(path: Path, value: msgspec.Struct) -> None:
    """Put ``value`` at ``path`` so that a reader or a power cut sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, kind: type[_T]) -> _T | None:
    """The record at ``path``; None when there is no file. Raises ServiceError for one that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ServiceError(f"{path}: {error}; move it away to start from nothing") from error


def withdraw(path: str) -> str:
    """Turn a decision to commit that nobody acted on into one to revert; what stands afterwards."""
    if decide(path, "revert") == "commit":
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}.withdrawn")
        scratch.write_text("revert")
        scratch.rename(target)
        sync_folder(target.parent)
    return Path(path).read_text()


def decide(path: str, wish: str) -> str:
    """Settle a rollout once for all who share ``path``: the first to write wins, and everyone gets the winner.

    ``wish`` is ``"commit"`` or ``"revert"``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{wish}")
    with scratch.open("w") as file:
        file.write(wish)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(scratch, target)
        sync_folder(target.parent)
        return wish
    except FileExistsError:
        return target.read_text()
    finally:
        scratch.unlink()
