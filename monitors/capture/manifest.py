"""A bundle on disk: files, and a manifest that is true at every moment.

An item is written beside its name, fsynced, renamed, and only then entered in the manifest, which is itself replaced
as a whole. A kill at any moment leaves a bundle whose manifest lists whole files only; a file that it does not list
yet is a note, not damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

SCHEMA = "lastbatch.bundle/1"
Outcome = Literal["taken", "failed", "skipped"]
_NAME = "manifest.json"


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
    """Writes one bundle. Safe to use from several threads.

    Raises (from every method):
        OSError: the disk is full or gone; what was written before stays valid.
    """

    def __init__(self, root: Path, deployment: str, reason: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        word = "".join(c if c.isalnum() else "-" for c in reason)[:24].strip("-") or "capture"
        base = f"{stamp}-{deployment}-{word}"
        root.mkdir(parents=True, exist_ok=True)
        self.folder = _make(root, base)
        self.id = self.folder.name
        self._head: dict[str, Any] = {"schema": SCHEMA, "id": self.id, "created_utc": utc(), "deployment": deployment, "reason": reason}
        self._head["verdict"] = None
        self._items: list[Item] = []
        self._lock = threading.Lock()
        self._write_manifest()

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    def add(self, path: str, data: bytes, *, probe: str, start: str, node: str = "", rank: int | None = None, note: str = "") -> None:
        """Keep an artefact. ``note`` becomes the item's reason: something that a reader must know about it."""
        _write(self.folder / path, data)
        self._enter(Item(path, node, rank, probe, start, utc(), "taken", note, hashlib.sha256(data).hexdigest()))

    def miss(self, probe: str, outcome: Outcome, reason: str, *, start: str = "", node: str = "", rank: int | None = None) -> None:
        """List what was not to be had, and why."""
        self._enter(Item("", node, rank, probe, start or utc(), utc(), outcome, reason, ""))

    def conclude(self, verdict: str) -> None:
        """Name the verdict in the manifest."""
        with self._lock:
            self._head["verdict"] = verdict
            self._write_manifest()

    def _enter(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
            self._write_manifest()

    def _write_manifest(self) -> None:
        text = json.dumps({**self._head, "items": [asdict(item) for item in self._items]}, indent=1)
        _write(self.folder / _NAME, text.encode())


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
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
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


def load(folder: Path) -> dict[str, Any]:
    """The manifest. Raises BundleError when there is none or it is not one."""
    try:
        raw = json.loads((folder / _NAME).read_text())
    except OSError as error:
        raise BundleError(f"{folder / _NAME}: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{folder / _NAME}: not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise BundleError(f"{folder / _NAME}: schema is {raw.get('schema') if isinstance(raw, dict) else None!r}, known is {SCHEMA!r}")
    return raw


def verify(folder: Path) -> Verification:
    """Check every item against its digest. Raises BundleError when there is no manifest to check."""
    manifest = load(folder)
    problems: list[str] = []
    listed = {_NAME}
    for item in manifest["items"]:
        if item["outcome"] != "taken":
            continue
        listed.add(item["path"])
        try:
            digest = hashlib.sha256((folder / item["path"]).read_bytes()).hexdigest()
        except OSError as error:
            problems.append(f"{item['path']}: {error.strerror}")
            continue
        if digest != item["sha256"]:
            problems.append(f"{item['path']}: SHA-256 is {digest}, the manifest says {item['sha256']}")
    extra = sorted(path.name for path in folder.iterdir() if path.name not in listed)
    notes = [f"{name}: not in the manifest (the capture was ended while it wrote this)" for name in extra]
    return Verification(tuple(problems), tuple(notes), len(manifest["items"]))
