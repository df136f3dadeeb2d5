"""The last configuration that was proven by checks: what a revert goes back to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from opsctl.rollout.plan import Command
from opsctl.service import record


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """``services``: what each service ran, by name. ``digest`` is empty where the engine has none."""

    deployment: str
    at_utc: str
    digest: str
    services: dict[str, Command]
    by: str = ""  # the rollout that proved it, or "verify"


def read(folder: Path) -> Verified | None:
    """Raises ServiceError for a file that cannot be read."""
    return record.read(folder / "verified.json", Verified)


def write(folder: Path, verified: Verified) -> None:
    record.write(folder / "verified.json", verified)
