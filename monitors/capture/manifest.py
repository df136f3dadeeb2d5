"""A bundle on disk: files, and a manifest that is true at every moment.

An item is written beside its name, fsynced, renamed, and only then entered in the manifest, which is itself replaced
as a whole. A kill at any moment leaves a bundle whose manifest lists whole files only; a file that it does not list
yet is a note, not damage.

A full disk costs the items that do not fit, never the manifest: a reserve is laid down with the bundle and given back
to the disk when nothing else is left, so that what could not be kept can still be said.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

SCHEMA = "lastbatch.bundle/1"
Outcome = Literal["taken", "failed", "skipped"]
_NAME = "manifest.json"
_RESERVE = ".reserve"
_RESERVE_BYTES = 256 << 10
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class BundleError(ValueError):
    """A bundle cannot be written or read; the text names the file and why."""


@dataclass(frozen=True)
class Item:
    """One artefact, or one that was not to be had. ``start`` and ``end`` are UTC; ``path`` and ``sha256`` are empty
    unless it was taken."""

    path: str
    node: str
    rank: int | None
    probe: str
    start: str
    end: str
    outcome: Outcome
    reason: str
    sha256: str


class Writer:
    """Writes one bundle. Safe to use from several threads. The manifest's own ``outcome`` is ``running`` until
    ``conclude``; a bundle that still says so was cut short.

    Raises (from every method):
        OSError: the disk is gone, or too full even for the manifest. An item that merely does not fit is listed as failed.
    """

    def __init__(self, root: Path, deployment: str, reason: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        word = "".join(c if c.isalnum() else "-" for c in reason)[:24].strip("-") or "capture"
        root.mkdir(parents=True, exist_ok=True)
        self.folder = _make(root, f"{stamp}-{deployment}-{word}")
        self.id = self.folder.name
        begun = utc()
        self._head: dict[str, Any] = {
            "schema": SCHEMA, "id": self.id, "created_utc": begun, "start": begun, "end": None, "outcome": "running",
            "deployment": deployment, "reason": reason, "verdict": None,
        }  # fmt: skip
        self._items: list[Item] = []
        self._lock = threading.Lock()
        self._write_manifest()
        with contextlib.suppress(OSError):  # a disk without room for the reserve may still have room for the boxes
            _write(self.folder / _RESERVE, b"\0" * _RESERVE_BYTES)

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    def add(self, path: str, data: bytes, *, probe: str, start: str, node: str = "", rank: int | None = None, note: str = "") -> bool:
        """Keep an artefact, and say whether it could be kept. ``path`` is relative to the bundle, with ``/`` between
        folders. ``note`` becomes the item's reason: something that a reader must know about it."""
        target = self.folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(target, data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            why = f"{path}: {error.strerror}: {len(data)} bytes did not fit"
            self.miss(probe, "failed", why, start=start, node=node, rank=rank)
            return False
        self._enter(Item(path, node, rank, probe, start, utc(), "taken", note, hashlib.sha256(data).hexdigest()))
        return True

    def miss(self, probe: str, outcome: Outcome, reason: str, *, start: str = "", node: str = "", rank: int | None = None) -> None:
        """List what was not to be had, and why."""
        self._enter(Item("", node, rank, probe, start or utc(), utc(), outcome, reason, ""))

    def describe(self, **fields: Any) -> None:
        """Add to the manifest's head: clocks, tools, digests."""
        with self._lock:
            self._head.update(fields)
            self._write_manifest()

    def conclude(self, verdict: str) -> None:
        """Name the verdict and the end. The outcome is ``complete`` when every item was taken, else ``partial``."""
        with self._lock:
            failed = any(item.outcome == "failed" for item in self._items)
            self._head.update(verdict=verdict, end=utc(), outcome="partial" if failed else "complete")
            (self.folder / _RESERVE).unlink(missing_ok=True)
            self._write_manifest()

    def _enter(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
            self._write_manifest()

    def _write_manifest(self) -> None:
        data = _manifest(self._head, [asdict(item) for item in self._items])
        try:
            _write(self.folder / _NAME, data)
        except OSError as error:
            reserve = self.folder / _RESERVE
            if error.errno not in _FULL or not reserve.exists():
                raise
            reserve.unlink()
            _write(self.folder / _NAME, data)


def append(folder: Path, path: str, data: bytes, *, probe: str, start: str) -> None:
    """Add an artefact to a bundle that is finished, or replace one of that name. Raises OSError and BundleError."""
    manifest = load(folder)
    _write(folder / path, data)
    entry = asdict(Item(path, "", None, probe, start, utc(), "taken", "", hashlib.sha256(data).hexdigest()))
    items = [item for item in manifest.pop("items") if item["path"] != path]
    _write(folder / _NAME, _manifest(manifest, [*items, entry]))


def _manifest(head: dict[str, Any], items: list[dict[str, Any]]) -> bytes:
    return json.dumps({**head, "items": items}, indent=1).encode()


def _make(root: Path, base: str) -> Path:
    for number in range(1000):
        folder = root / (f"{base}-{number}" if number else base)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise BundleError(f"{root}/{base}: a thousand bundles of this second exist already")


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.part")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        scratch.unlink(missing_ok=True)  # half a file would keep the room that the manifest needs
        raise
    scratch.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut as well
    finally:
        os.close(folder)


def utc(unix_s: float | None = None) -> str:
    """A UTC time stamp with milliseconds."""
    moment = datetime.fromtimestamp(time.time() if unix_s is None else unix_s, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Verification:
    """``problems`` make a bundle invalid; ``notes`` do not."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    items: int

    @property
    def ok(self) -> bool:
        return not self.problems


class _Row(msgspec.Struct):
    path: str
    node: str
    rank: int | None
    probe: str
    start: str
    end: str
    outcome: str
    reason: str
    sha256: str


class _Head(msgspec.Struct):
    """What every reader of a manifest leans on. The rest of its head may be anything."""

    items: list[_Row]
    verdict: str | None
    id: str = ""
    created_utc: str = ""
    start: str = ""
    end: str | None = None
    outcome: str = ""
    deployment: str = ""
    reason: str = ""


def load(folder: Path) -> dict[str, Any]:
    """The manifest. Raises BundleError when there is none or it is not one."""
    try:
        raw = json.loads((folder / _NAME).read_text())
    except OSError as error:
        raise BundleError(f"{folder / _NAME}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / _NAME}: not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise BundleError(f"{folder / _NAME}: schema is {raw.get('schema') if isinstance(raw, dict) else None!r}, known is {SCHEMA!r}")
    try:
        head = msgspec.convert(raw, _Head)
        for stamp in filter(None, (head.created_utc, head.start, head.end)):
            datetime.fromisoformat(stamp)
    except ValueError as error:
        raise BundleError(f"{folder / _NAME}: no manifest of a bundle: {error}") from error
    return raw


def _later(name: str) -> str:
    if name.startswith("runbook-"):
        return "the record of a runbook that was run on this bundle; no digest vouches for it"
    return "the capture was ended while it wrote this"


def verify(folder: Path) -> Verification:
    """Check every item against its digest. Raises BundleError when there is no manifest to check."""
    manifest = load(folder)
    problems: list[str] = []
    notes: list[str] = []
    listed = {_NAME, _RESERVE}
    for item in manifest["items"]:
        if item["outcome"] != "taken":
            continue
        path = item["path"]
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            problems.append(f"{path}: leads out of the bundle")
            continue
        listed.add(path)
        try:
            digest = hashlib.sha256((folder / path).read_bytes()).hexdigest()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if digest != item["sha256"]:
            problems.append(f"{path}: SHA-256 is {digest}, the manifest says {item['sha256']}")
    if manifest.get("outcome") == "running":
        notes.append("the capture was cut short: the manifest has no end; what it lists is whole")
    extra = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    notes += [f"{name}: not in the manifest ({_later(name)})" for name in extra if name not in listed]
    taken = sum(item["outcome"] == "taken" for item in manifest["items"])
    return Verification(tuple(problems), tuple(notes), taken)
