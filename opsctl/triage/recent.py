"""What the monitor has taken of this start of the server: its bundles, and what it saw over time.

One look sees no corruption under load and no slot that leaks slowly; the monitor's bundles say so, and a bundle of this
invocation speaks of the server that is looked at now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from opsctl.triage.picture import Incident

_MOST = 5
_KEPT = ("canary", "slots", "markup")


def incidents(root: Path, deployment: str, since_unix_s: float) -> tuple[Incident, ...]:
    """The bundles of a deployment that were begun since then, newest first. Triage's own are none."""
    found = []
    for manifest in root.glob("*/manifest.json"):
        head = _json(manifest)
        began = _unix(str(head.get("created_utc", "")))
        if head.get("deployment") == deployment and head.get("reason") != "triage" and began >= since_unix_s:
            found.append(
                Incident(
                    manifest.parent.name,
                    str(head.get("verdict") or "not judged"),
                    str(head["created_utc"]),
                    str(manifest.parent),
                    str(head.get("reason") or ""),
                )
            )
    return tuple(sorted(found, key=lambda one: one.created_utc, reverse=True)[:_MOST])


def watched(found: tuple[Incident, ...]) -> dict[str, Any]:
    """What a monitor saw over time, from the newest bundle that holds it; with the bundle it is from."""
    seen: dict[str, Any] = {}
    for one in found:
        progress = _json(Path(one.path) / "progress.json")
        for key in _KEPT:
            if progress.get(key) and key not in seen:
                seen[key] = progress[key]
                seen.setdefault("from", []).append(f"{one.id}: {key}")
    return seen


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unix(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
