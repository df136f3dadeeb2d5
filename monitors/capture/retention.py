"""How much evidence is kept, and how often it is taken. The newest bundle is never removed to make room."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monitors.capture.archive import SUFFIX

_LEAST_FREE_BYTES = 64 << 20
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Kept:
    """One bundle on disk: its folder and archive, whichever exist. ``bytes`` is both together."""

    id: str
    paths: tuple[Path, ...]
    bytes: int


def bundles(root: Path) -> list[Kept]:
    """All bundles below a root, oldest first (their names begin with their time)."""
    found: dict[str, list[Path]] = {}
    if root.is_dir():
        for path in root.iterdir():
            if path.is_dir() and (path / "manifest.json").is_file():
                found.setdefault(path.name, []).append(path)
            elif path.name.endswith(SUFFIX) and not path.name.startswith("."):
                found.setdefault(path.name.removesuffix(SUFFIX), []).append(path)
    return [Kept(name, tuple(paths), sum(map(_size, paths))) for name, paths in sorted(found.items())]


def surplus(kept: Sequence[Kept], *, most: int, most_bytes: int) -> list[Kept]:
    """What has to go, oldest first, until count and bytes fit; the newest stays whatever its size."""
    going: list[Kept] = []
    staying = list(kept)
    while len(staying) > 1 and (len(staying) > most or sum(one.bytes for one in staying) > most_bytes):
        going.append(staying.pop(0))
    return going


def prune(root: Path, *, most: int, most_bytes: int, least_free: int = _LEAST_FREE_BYTES) -> list[str]:
    """Remove the surplus, and more of the oldest while the disk has less than ``least_free`` bytes. Returns their ids."""
    kept = bundles(root)
    gone = surplus(kept, most=most, most_bytes=most_bytes)
    for one in gone:
        _remove(one)
    left = kept[len(gone) :]
    while len(left) > 1 and _free(root) < least_free:
        gone.append(left[0])
        _remove(left.pop(0))
    return [one.id for one in gone]


def too_often(taken_unix_s: Sequence[float], now_unix_s: float, most_per_hour: int) -> bool:
    """Whether the captures of the last hour are as many as may be. A clock that was set back counts nothing twice."""
    return sum(1 for at in taken_unix_s if 0 <= now_unix_s - at < _HOUR_S) >= most_per_hour


def _remove(one: Kept) -> None:
    for path in one.paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _free(root: Path) -> int:
    with contextlib.suppress(OSError):
        found = os.statvfs(root)
        return found.f_bavail * found.f_frsize
    return 1 << 62  # a disk that cannot be asked is no reason to remove evidence


def _size(path: Path) -> int:
    total = 0
    for one in path.rglob("*") if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += one.stat().st_size
    return total
