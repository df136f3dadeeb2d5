"""Silences: for a while nobody is paged for a deployment or a class; each has an end, and evidence is taken all the
same. And acknowledgements: somebody has taken an incident, so it is not paged again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Silence:
    """``deployment`` and ``verdict`` are patterns (``*``, ``hang_*``)."""

    deployment: str
    verdict: str
    until_unix_s: float
    who: str
    why: str


def active(found: Sequence[Silence], deployment: str, verdict: str, now_unix_s: float) -> Silence | None:
    """The silence that holds for this page, if one does."""
    for one in found:
        if now_unix_s < one.until_unix_s and fnmatchcase(deployment, one.deployment) and fnmatchcase(verdict, one.verdict):
            return one
    return None


def load(path: Path) -> list[Silence]:
    """Those on disk; none when the file is absent or was cut: a page too many is better than one too few."""
    try:
        return [Silence(**row) for row in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def save(path: Path, found: Sequence[Silence], now_unix_s: float) -> None:
    """Keep those that have not ended. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.write_text(json.dumps([asdict(one) for one in found if one.until_unix_s > now_unix_s], indent=1))
    scratch.replace(path)


def acknowledge(path: Path, deployment: str, who: str, now_unix_s: float) -> None:
    """Whatever is open on the deployment now is taken. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.write_text(json.dumps({**_acks(path), deployment: {"unix_s": now_unix_s, "who": who}}, indent=1))
    scratch.replace(path)


def acknowledged(path: Path, deployment: str, paged_unix_s: float) -> bool:
    """Whether somebody has acknowledged since the page went out."""
    entry = _acks(path).get(deployment)
    return isinstance(entry, dict) and float(entry.get("unix_s", 0.0)) >= paged_unix_s


def _acks(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
