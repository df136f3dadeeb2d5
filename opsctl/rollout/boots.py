"""Boots of a deployment that ended in a proven service: how long this one takes, by its own record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from opsctl.service import record

_KEPT = 50
RECENT = 10  # of these the slowest counts: an old machine's boots are no measure for ever


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds``: from the start of the group's processes until all were ready and the API healthy. ``by``: the
    rollout that saw it, or ``verify``."""

    at_utc: str
    seconds: float
    digest: str = ""
    by: str = ""


class _Book(msgspec.Struct, frozen=True):
    boots: list[Boot] = []


def read(folder: Path) -> list[Boot]:
    """Oldest first. Raises ServiceError for a file that cannot be read."""
    found = record.read(folder / "boots.json", _Book)
    return found.boots if found else []


def add(folder: Path, boot: Boot) -> None:
    """A boot by the same rollout with the same seconds is the same boot, seen twice."""
    known = read(folder)
    if not any((one.by, one.seconds) == (boot.by, boot.seconds) for one in known):
        record.write(folder / "boots.json", _Book([*known, boot][-_KEPT:]))


def slowest(boots: Sequence[Boot]) -> Boot | None:
    """Of the recent ones; None when there are none."""
    return max(boots[-RECENT:], key=lambda boot: boot.seconds, default=None)
