"""Is an end planned? Three marks say so: a rollout's lease (it proves, reverts and pages by itself), a start that was told to
stop, and a dead-man's revert. Each is looked for where the service manager keeps it, when a server has ended.

What it cannot see: an order that was given past the service manager (``kill PID``); the server's own log tells of that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monitors.fleet import Deployment, Service
from monitors.remote import NodeError, Remote

_GRACE_S = 60.0  # a dead-man's restart comes after its lease has ended
_DEADLINE_S = 6.0
_UNIT_STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"  # systemd's message that a stop job has begun; its invocation is the one that ends
# One line for each mark. $1: the dead-man's folder of the unit, $2: an embedded service's, $3: the unit, empty where systemd
# has none; $5: of which of its managers.
ASK = r"""
export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
[ "$5" = --system ] || set -- "$XDG_RUNTIME_DIR/${1#/run/}" "$2" "$3" "$4" "$5" USER_
echo "uptime $(cat /proc/uptime)"
echo "lease $(cat "$1/lease" 2>/dev/null || cat "$1/lease.ended" 2>/dev/null)"
echo "reverted $(cat "$1/reverted" 2>/dev/null)"
echo "ordered $(cat "$1/ordered" 2>/dev/null)"
echo "held $(cat "$2/lease.json" 2>/dev/null)"
echo "state $(cat "$2/state.json" 2>/dev/null)"
[ -n "$3" ] || exit 0
echo "invocation $(systemctl "$5" show -p InvocationID --value "$3" 2>/dev/null)"
echo "stopping $(timeout 3 journalctl -q -n 1 -o json MESSAGE_ID="$4" "${6}UNIT=$3" 2>/dev/null)"
"""
_INVOCATION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Planned:
    """Why an end is no crash. ``event`` is what it is told as: ``planned_end`` or ``deadman_reverted``."""

    event: str
    text: str


def end(deployment: Deployment, remotes: Mapping[str, Remote], invocation: str) -> Planned | None:
    """What planned the end of ``invocation`` (empty where that is not known); None when nothing did, or no node can be asked."""
    for node in deployment.node:
        for service in node.service:
            remote = remotes[node.name]
            try:
                done = remote.run(_question(service, deployment.service), deadline_s=_DEADLINE_S)
            except NodeError:
                continue
            found = told(done.out.decode(errors="replace"), time.monotonic() if remote.local else None, invocation)
            if found is not None:
                return Planned(found.event, f"{found.text} ({service.unit})")
    return None


def _question(service: Service, manager: str) -> list[str]:
    embedded = f"{service.run_dir}/.supervisor" if service.run_dir else "/nonexistent"
    unit = "" if manager == "embedded" else service.unit
    scope = "--user" if manager == "systemd-user" else "--system"
    return ["sh", "-c", ASK, "sh", f"/run/opsctl/{service.unit}", embedded, unit, _UNIT_STOPPING, scope]


def told(text: str, mono_s: float | None, invocation: str = "") -> Planned | None:
    """What a node's marks say. ``mono_s`` is the clock of embedded leases where it is not the node's uptime. Pure.

    ::

        uptime 100.50 9          of the node
        lease TOKEN 16000        a unit's: its end in hundredths of uptime
        reverted TOKEN WHEN      by the dead-man
        ordered INVOCATION       told to stop by opsctl
        held {...}, state {...}  an embedded service's lease and record
        invocation INVOCATION    the unit's last start
        stopping {...}           systemd's last word that a stop has begun
    """
    marks = dict(line.partition(" ")[::2] for line in text.splitlines())
    try:
        uptime = float(marks["uptime"].split()[0])
    except (KeyError, IndexError, ValueError):
        return None
    record, held = _json(marks.get("state", "")), _json(marks.get("held", ""))
    ends = set(_INVOCATION.findall(invocation)) or {marks.get("invocation", "").strip(), str(record.get("invocation_id", ""))} - {""}
    by_embedded = str(record.get("ordered", "")) in ends
    lease = marks.get("lease", "").split()
    lives = len(lease) == 2 and lease[1].isdigit() and int(lease[1]) / 100 + _GRACE_S > uptime
    reverted = marks.get("reverted", "").partition(" ")[0].strip()
    if by_embedded and record.get("ordered_by"):  # a rollout whose dead-man it was
        return _reverted(str(record["ordered_by"]))
    if lives and reverted == lease[0]:
        return _reverted(reverted)
    if lives:
        return Planned("planned_end", f"a rollout holds the lease {lease[0][:12]}")
    now = uptime if mono_s is None else mono_s
    until = held.get("until_mono")
    if isinstance(until, int | float) and held.get("token") and until + _GRACE_S > now:
        return Planned("planned_end", f"a rollout holds the lease {str(held['token'])[:12]}")
    if by_embedded or marks.get("ordered", "").strip() in ends or str(_json(marks.get("stopping", "")).get("INVOCATION_ID", "")) in ends:
        return Planned("planned_end", "the service manager was told to stop it")
    return None


def _reverted(token: str) -> Planned:
    text = f"rollout {token[:12]} was reverted by the dead-man: its operator is gone; run `opsctl rollout resume`"
    return Planned("deadman_reverted", text)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
