"""A results file: what was asked of whom, on which machine and day, and every repetition's figures.

A figure means something beside another only where the machine, the day and the requests were the same; that is what
``differs`` says, and what ``compare`` refuses.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from opsctl import wholefile
from opsctl.load.figures import Spread
from opsctl.load.summary import Summary

SCHEMA = "lastbatch.load/1"
_MOST_BYTES = 64 << 20


class ResultsError(ValueError):
    """A results file that cannot be read or written; the text names it and says why."""


class Host(msgspec.Struct, frozen=True):
    """Where the client ran."""

    name: str
    cpu: str
    cores: int
    python: str


class Side(msgspec.Struct, frozen=True):
    """A server, or one configuration of it. ``fingerprints``: the ``system_fingerprint`` values of its answers."""

    name: str
    url: str
    model: str
    command: str = ""
    fingerprints: tuple[str, ...] = ()


class Cell(msgspec.Struct, frozen=True):
    """One level on one side: a summary for each repetition, in the order in which they were taken."""

    side: str
    level: str
    streams: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    reps: Annotated[tuple[Summary, ...], msgspec.Meta(min_length=1)]

    def spread(self, metric: str) -> Spread | None:
        values = [value for rep in self.reps if (value := rep.value(metric)) is not None]
        return Spread.of(values) if values else None

    def errors(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for rep in self.reps:
            for kind, count in {**rep.errors, **rep.not_ours}.items():
                found[kind] = found.get(kind, 0) + count
        return found


class Results(msgspec.Struct, frozen=True):
    schema: str
    begun_utc: str
    host: Host
    seed: int
    shapes: list[dict[str, Any]]
    shapes_digest: str
    sides: Annotated[tuple[Side, ...], msgspec.Meta(min_length=1, max_length=2)]
    cells: tuple[Cell, ...]
    ended_utc: str = ""
    load_average: float = 0.0  # before the run: who else used the machine
    notes: tuple[str, ...] = ()
    fresh: bool = False  # no random prompt stood in a prefix cache of before

    @property
    def day(self) -> str:
        return self.begun_utc[:10]

    def of(self, side: str) -> dict[str, Cell]:
        """The cells of a side by level."""
        return {cell.level: cell for cell in self.cells if cell.side == side}


def here() -> Host:
    return Host(platform.node(), _cpu(), len(os.sched_getaffinity(0)), platform.python_version())


def _cpu(path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        names = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def utc(unix_s: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def write(path: Path, results: Results) -> None:
    """Replaces the file as a whole. Raises ResultsError."""
    try:
        wholefile.write(path, (json.dumps(msgspec.to_builtins(results), indent=1) + "\n").encode())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error


def can_write(path: Path) -> None:
    """Raises ResultsError where ``write`` would find no room for its first byte."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        wholefile.write(probe, b"\n")
        probe.unlink()
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error


def read(path: Path) -> Results:
    """Raises ResultsError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ResultsError(f"{path}: more than {_MOST_BYTES} bytes are no results of opsctl load")
        found = msgspec.json.decode(data, type=Results)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ResultsError(f"{path}: no results of opsctl load: {error}") from error
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    if found.schema != SCHEMA:
        raise ResultsError(f"{path}: schema is {found.schema!r}, known is {SCHEMA!r}")
    return found


def differs(before: Results, after: Results) -> tuple[str, ...]:
    """Why the two must not be compared: another client's machine, another server's, another day, other requests."""
    found = []
    if before.host != after.host:
        found.append(f"taken on different hosts: {_told(before.host)} and {_told(after.host)}")
    if before.day != after.day:
        found.append(f"taken on different days: {before.day} and {after.day}")
    if _servers(before.sides) != _servers(after.sides):
        found.append(f"of servers on different hosts: {', '.join(_servers(before.sides))} and {', '.join(_servers(after.sides))}")
    if before.shapes_digest != after.shapes_digest:
        found.append("different requests were sent (shapes or seed)")
    if before.fresh != after.fresh:
        found.append("prompts of one run may have stood in the server's prefix cache, those of the other did not")
    return tuple(found)


def _servers(sides: Sequence[Side]) -> list[str]:
    return sorted({urlsplit(side.url).hostname or side.url for side in sides})


def _told(host: Host) -> str:
    return f"{host.name} ({host.cpu}, {host.cores} cores, Python {host.python})"
