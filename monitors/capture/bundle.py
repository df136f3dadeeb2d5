"""Take a bundle: the evidence of one moment from all nodes of a deployment, judged by the same code that judges a
recorded case. The monitor calls this when a stall is declared, and ``opsctl capture`` on demand.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors import casefolder, engines, fleet, keyfile
from monitors.capture.field import Field, kept_words
from monitors.capture.manifest import BundleError, Item, Verification, Writer, load, utc, verify
from monitors.capture.nodes import Patient
from monitors.capture.probes import PROBES
from monitors.capture.redact import Policy
from monitors.judge.verdict import Verdict
from monitors.remote import Remote

__all__ = ["BundleError", "Captured", "Verification", "auth_headers", "budget", "capture", "load", "verify"]

_MARGIN_S = 5.0
_LEAST_BUDGET_S = 3.0
_DEFAULT_BUDGET_S = 90.0


@dataclass(frozen=True)
class Captured:
    """A finished bundle. ``seconds`` is what the capture took."""

    folder: Path
    verdict: Verdict
    items: tuple[Item, ...]
    seconds: float

    @property
    def gaps(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.outcome != "taken")


def budget(deployment: fleet.Deployment, quiet_s: float) -> float:
    """Seconds until the engine's watchdog may kill: watchdog - time since the last batch - margin. A watchdog that
    should have fired already still leaves the least budget: the order of the probes makes even that worth its while."""
    watchdog_s = deployment.watchdog_s or engines.load(deployment.engine).watchdog_s
    left = watchdog_s - quiet_s - min(_MARGIN_S, 0.1 * watchdog_s)
    return max(_LEAST_BUDGET_S, min(left, _DEFAULT_BUDGET_S))


def capture(
    deployment: fleet.Deployment,
    *,
    reason: str = "on demand",
    budget_s: float = 60.0,
    root: Path | None = None,
    native: bool = False,
    stacks: bool = True,
    core_dump: bool = False,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    progress: Mapping[str, Any] | None = None,
    suspicion: Mapping[str, Any] | None = None,
    fleet_text: str = "",
    trail: str = "",
    remotes: Mapping[str, Remote] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Captured:
    """Capture a deployment from all its nodes and judge the bundle.

    Args:
        reason: goes into the bundle's name and manifest.
        budget_s: what the probes may take together; those that do not fit are listed.
        root: folder for bundles; by default ``fleet.bundle_root``.
        native: also take native stacks, which pause every process.
        stacks: take stacks at all; a monitor that has captured too often leaves the processes alone.
        core_dump: trigger a CUDA core dump of every rank where the driver offers one.
        policy: what is taken out of texts.
        progress: what the monitor saw ({stalled_s, state, ...}); kept as ``progress.json`` and used by the judge.
        suspicion: the light sample that the monitor kept before it declared.
        trail: the monitor's recent samples, one JSON object a line.
        remotes: open connections by node name; others are opened, and closed at the end.
        say: called with one line for each probe that begins.

    Raises:
        OSError: the bundle folder cannot be written.
    """
    started = time.monotonic()
    writer = Writer(root or fleet.bundle_root(deployment), deployment.name, reason)
    with contextlib.ExitStack() as opened:
        connections = {node.name: Patient((remotes or {}).get(node.name) or opened.enter_context(Remote(node))) for node in deployment.node}
        dialect = engines.load(deployment.engine)
        field = Field(
            deployment, dialect, connections, writer, auth_headers(deployment), started + budget_s, native, stacks, core_dump, policy
        )
        fleet_digest = hashlib.sha256(fleet_text.encode()).hexdigest() if fleet_text else ""
        writer.describe(engine=deployment.engine, api=deployment.api, captured_by=_versions(), redaction=policy.to_json(),
                        budget_s=round(budget_s, 1), fleet_sha256=fleet_digest)  # fmt: skip
        if progress is not None:
            writer.add("progress.json", json.dumps(dict(progress), indent=1).encode(), probe="progress", start=utc())
        if suspicion is not None:
            writer.add("suspicion.json", json.dumps(dict(suspicion), indent=1).encode(), probe="suspicion", start=utc())
        if fleet_text:
            field.add_text("fleet.toml", fleet_text, probe="fleet", start=utc())
        if trail:
            field.add_text("monitor/trail.jsonl", trail, probe="trail", start=utc())
        for probe in PROBES:
            if why := probe.unasked(field):
                writer.miss(probe.name, "skipped", why)
                continue
            left = field.until_s - time.monotonic()
            if left < probe.least_s:
                writer.miss(
                    probe.name,
                    "skipped",
                    f"{max(left, 0.0):.1f} s of the budget of {budget_s:.0f} s were left, it needs {probe.least_s:.1f} s",
                )
                continue
            say(probe.name)
            begun, field.probe = utc(), probe.name
            try:
                probe.run(field, max(0.5, min(probe.deadline_s, left)))
            except OSError:
                raise
            except Exception as error:  # a probe's own fault must not cost the evidence of those that follow
                writer.miss(probe.name, "failed", f"the probe itself failed: {type(error).__name__}: {error}", start=begun)
        for node, name, why in field.lanes.drain(max(_LEAST_BUDGET_S, field.until_s - time.monotonic())):
            writer.miss(name, "failed", f"node {node}: {why}", node=node)
        kept_words(field)
    writer.describe(config_digests=_config_digests(writer.folder))
    verdict = casefolder.judge(writer.folder)
    writer.add("verdict.json", json.dumps(verdict.to_json(), indent=1).encode(), probe="verdict", start=utc())
    writer.conclude(verdict.verdict.value)
    return Captured(writer.folder, verdict, writer.items, time.monotonic() - started)


def _versions() -> dict[str, str]:
    """What took the bundle."""
    try:
        ours = importlib.metadata.version("lastbatch")
    except importlib.metadata.PackageNotFoundError:
        ours = "not installed"
    return {"lastbatch": ours, "python": platform.python_version(), "host": os.uname().nodename}


def _config_digests(folder: Path) -> dict[str, str]:
    """The configuration digest of each rank, from its black box."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("rank-*.box")):
        with contextlib.suppress(blackbox.BoxError, OSError):
            header = blackbox.read(path, events=False).header
            found[str(header.rank)] = header.config_digest
    return found


def auth_headers(deployment: fleet.Deployment) -> dict[str, str]:
    """The header that the deployment's API key makes; empty without one, or when its file cannot be read (the answer
    401 then says so)."""
    if not deployment.api_key_file:
        return {}
    try:
        return {"Authorization": f"Bearer {keyfile.read(deployment.api_key_file)}"}
    except OSError:
        return {}
