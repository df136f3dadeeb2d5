"""What was seen of a deployment before a change: what the same look after it is held against.

It lies beside the journals with answers to opsctl's own prompts in it, never a client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from opsctl.callers.agreed import Agreed
from opsctl.callers.traffic import Rates
from opsctl.rollout.throughput import Speed
from opsctl.service import record


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """``classes``: the class of each caller's answer, by caller; ``rungs``: of each rung of the smoke ladder;
    ``greedy``: answers to fixed prompts; ``exact``: they were computed in float32; ``paths``: which callers' own path led here."""

    at_utc: str
    classes: dict[str, str] = {}
    rungs: dict[str, str] = {}
    greedy: dict[str, str] = {}
    exact: bool = False
    rates: Rates = Rates()
    paths: dict[str, str] = {}
    speed: Speed | None = None


class Recorded(msgspec.Struct, frozen=True):
    """The class of one caller's answer as it was last asked, and by which configuration (empty: not known)."""

    kind: str
    at_utc: str
    digest: str = ""


def read(folder: Path) -> Before | None:
    """Raises ServiceError for a file that cannot be read."""
    return record.read(folder / "before.json", Before)


def write(folder: Path, found: Before) -> None:
    record.write(folder / "before.json", found)


class _Callers(msgspec.Struct, frozen=True):
    recorded: dict[str, Recorded] = {}
    agreed: dict[str, Agreed] = {}


def recorded(folder: Path) -> Mapping[str, Recorded]:
    """By caller, those that are never sent beside live traffic among them. Raises ServiceError."""
    return _callers(folder).recorded


def agreed(folder: Path) -> Mapping[str, Agreed]:
    """What committed rollouts declared. Raises ServiceError."""
    return _callers(folder).agreed


def _callers(folder: Path) -> _Callers:
    return record.read(folder / "callers.json", _Callers) or _Callers()


def keep(folder: Path, more: Mapping[str, Recorded], declared: Mapping[str, Agreed]) -> None:
    """Add to what is recorded and declared of callers."""
    now = _callers(folder)
    record.write(folder / "callers.json", _Callers({**now.recorded, **more}, {**now.agreed, **declared}))
