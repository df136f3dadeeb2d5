"""Is an end planned? A rollout holds a lease on every service it restarts, and while one lives a process that ends is
no crash: the rollout proves, reverts and pages by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from monitors.fleet import Deployment
from monitors.remote import NodeError, Remote

_GRACE_S = 60.0  # a dead-man's restart comes after its lease has ended
_DEADLINE_S = 4.0


def lease(deployment: Deployment, remotes: Mapping[str, Remote]) -> str:
    """Who holds a lease now, in words; empty when nobody does, or when a node cannot be asked."""
    for node in deployment.node:
        for service in node.service:
            remote = remotes[node.name]
            unit = f"/run/opsctl/{service.unit}"
            embedded = f"{service.run_dir}/.supervisor/lease.json" if service.run_dir else "/nonexistent"
            script = 'cat /proc/uptime; cat "$1/lease" 2>/dev/null || cat "$1/lease.ended" 2>/dev/null; echo; cat "$2" 2>/dev/null || true'
            try:
                done = remote.run(["sh", "-c", script, "sh", unit, embedded], deadline_s=_DEADLINE_S)
            except NodeError:
                continue
            found = held(done.out.decode(errors="replace"), time.monotonic() if remote.local else None)
            if found:
                return f"{found} on {service.unit}"
    return ""


def held(text: str, mono_s: float | None) -> str:
    """The holder of a lease, from what a node says: its uptime, a unit's lease (``TOKEN HUNDREDTHS-OF-UPTIME``), an
    embedded service's record. Pure."""
    lines = text.splitlines()
    try:
        uptime = float(lines[0].split()[0])
    except (IndexError, ValueError):
        return ""
    words = lines[1].split() if len(lines) > 1 else []
    if len(words) == 2 and words[1].isdigit() and int(words[1]) / 100 + _GRACE_S > uptime:
        return f"a rollout holds the lease {words[0][:12]}"
    try:
        record = json.loads("\n".join(lines[2:]))
        until, token = float(record["until_mono"]), str(record["token"])
    except (ValueError, KeyError, TypeError):
        return ""
    now = uptime if mono_s is None else mono_s
    return f"a rollout holds the lease {token[:12]}" if until + _GRACE_S > now else ""
