"""What differs between two bundles: of one server before and after, or of two wedges that look alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors.capture.manifest import load
from monitors.judge.verdict import Verdict


@dataclass(frozen=True)
class Difference:
    """``what`` names the thing; ``before`` and ``after`` are None where a bundle does not have it."""

    what: str
    before: Any
    after: Any


def compare(before: Path, after: Path) -> list[Difference]:
    """Verdict, evidence, settings, ranks, tools and artefacts, in that order. Raises BundleError."""
    one, two = _facts(before), _facts(after)
    keys = [*one, *(key for key in two if key not in one)]
    return [Difference(key, one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)]


def _facts(folder: Path) -> dict[str, Any]:
    manifest = load(folder)
    found: dict[str, Any] = {"deployment": manifest["deployment"], "verdict": manifest["verdict"], "outcome": manifest.get("outcome")}
    verdict = _json(folder / "verdict.json")
    if verdict:
        judged = Verdict.from_json(verdict)
        found["confidence"] = judged.confidence
        found["suspects"] = list(judged.suspects)
    progress = _json(folder / "progress.json")
    found.update({f"progress.{key}": value for key, value in progress.items() if key != "last_progress_utc"})
    settings: dict[str, Any] = {}
    for path in sorted(folder.glob("rank-*.box")):
        try:
            snapshot = blackbox.read(path, events=False)
        except blackbox.BoxError:
            continue
        host, device, rank = snapshot.host, snapshot.device, snapshot.header.rank
        found[f"rank {rank}"] = {
            "phase": host.phase.name, "device": device.state.name, "step": host.step, "collectives": [device.enqueued, device.completed],
            "running": host.running, "held": host.held,
        }  # fmt: skip
        settings = settings or _flat(json.loads(snapshot.settings_json or "{}"))
    found.update({f"setting {key}": value for key, value in settings.items()})
    found.update({f"tools of {node}": tools for node, tools in manifest.get("tools", {}).items()})
    found["fleet_sha256"] = manifest.get("fleet_sha256")
    for item in manifest["items"]:
        name = item["path"] or f"{item['probe']} {item['node']}".strip()
        found[f"item {name}"] = item["outcome"] if item["outcome"] == "taken" else f"{item['outcome']}: {item['reason']}"
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
