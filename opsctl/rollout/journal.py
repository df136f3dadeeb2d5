"""The write-ahead journal of a rollout: JSON lines, each on the disk before what it announces is done.

A line's state says what comes next, so a reader who finds it last must assume that it may have happened, and that
nothing after it has. Every step can be done twice.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from opsctl.rollout.plan import Plan
from opsctl.service.manager import ServiceError


class State(enum.StrEnum):
    planned = "planned"
    armed = "armed"  # dead-men are being armed
    applied = "applied"  # trials are being written
    restarted = "restarted"  # the group is being stopped and started
    proving = "proving"
    soaking = "soaking"
    committed = "committed"
    held = "held"
    reverting = "reverting"
    reverted = "reverted"
    stuck = "stuck"

    @property
    def final(self) -> bool:
        return self in (State.committed, State.reverted, State.stuck)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    at_utc: str
    mono: float
    state: State
    event: str = ""
    plan: Plan | None = None
    data: dict[str, Any] = {}


class NoPlan(ServiceError, ValueError):
    """A journal that was cut off before its plan was written, or that somebody changed."""


class Journal:
    """One rollout's file. ``entries`` is what it held when opened, and what was added since."""

    def __init__(self, path: Path, utc: Callable[[], str], mono: Callable[[], float]) -> None:
        self.path, self._utc, self._mono = path, utc, mono
        self.entries: list[Entry] = read(path) if path.exists() else []

    @property
    def id(self) -> str:
        return self.path.stem

    @property
    def state(self) -> State:
        return self.entries[-1].state if self.entries else State.planned

    @property
    def plan(self) -> Plan:
        found = next((entry.plan for entry in self.entries if entry.plan is not None), None)
        if found is None:
            raise NoPlan(f"{self.path}: holds no plan; it was cut off before anything was changed, so it can be deleted")
        return found

    def write(self, state: State, event: str = "", *, plan: Plan | None = None, **data: Any) -> None:
        """Append and fsync. Raises OSError: then nothing may be done that the line announces."""
        entry = Entry(at_utc=self._utc(), mono=self._mono(), state=state, event=event, plan=plan, data=data)
        fresh = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _append(descriptor, msgspec.json.encode(entry) + b"\n")
        finally:
            os.close(descriptor)
        if fresh:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)
        self.entries.append(entry)


def _append(descriptor: int, line: bytes) -> None:
    """After the last whole line, whatever a power cut or a full disk left behind it; on the disk when this returns."""
    end = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        end -= 1
    os.ftruncate(descriptor, end)
    if os.pwrite(descriptor, line, end) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def read(path: Path) -> list[Entry]:
    """Every whole line. A last line that a power cut left half written announces nothing, and is left out.

    Raises ValueError for any other line that cannot be read.
    """
    found = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(msgspec.json.decode(line, type=Entry))
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: {error}") from error
    return found


def all_of(folder: Path) -> list[Path]:
    """Journals of a deployment, oldest first."""
    return sorted(folder.glob("*.jsonl"))
