"""The last configuration that was proven by checks: what a revert goes back to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from opsctl.rollout.plan import Command, Plan, RevertTarget
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


def target_of(known: Verified | None, made: Plan) -> RevertTarget | None:
    """What a plan shows of it."""
    if known is None:
        return None
    same = all(known.services.get(service.name) == service.before for service in made.services)
    return RevertTarget(known.digest, known.at_utc, known.by, same)
