"""How a deployment stands, for the person who finds it: what each service runs and who holds it; of a rollout that has not
ended who went back, when, why, and what to do next."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opsctl.rollout import overlay
from opsctl.rollout.journal import State
from opsctl.rollout.target import Member
from opsctl.service.manager import Override, ServiceManager, Unreachable

_OPEN = [str(state) for state in State if not state.final and state is not State.planned]


def of(member: Member) -> dict[str, Any]:
    """One service as data; one whose machine does not answer says so in ``error`` and hides no other."""
    manager = member.manager
    found: dict[str, Any] = {"name": member.name, "node": manager.node, "ranks": list(member.ranks), "error": ""}
    try:
        change, (token, at_utc) = manager.read_change(), manager.reverted()
        unit = (change.trial or change.committed or Override(())).unit
        return found | {
            **msgspec.to_builtins(manager.snapshot()), "argv": list(manager.command().argv), "committed": change.committed is not None,
            "trial": change.trial is not None, "held_by": manager.lease_token(), "overlays": _overlays(manager),
            "reverted_by_deadman": {"rollout": token, "at_utc": at_utc} if token else None, "unit_file": unit.name if unit else "",
        }  # fmt: skip
    except Unreachable as error:
        return found | {"error": str(error), "state": "not reached", "trial": None, "held_by": "", "reverted_by_deadman": None}


def _overlays(manager: ServiceManager) -> list[dict[str, str]]:
    """Files that the service sees in the place of others, and whether every process reads what was put there."""
    found, pids = [], manager.pids()
    for target_path, source in manager.command().mounts.items():
        wanted = overlay.sha_of(source)
        sums = overlay.seen(manager, target_path, pids) if pids else {}
        right = sum(value.startswith(wanted) for value in sums.values())
        seen = f"{right} of {len(sums)} processes read it" if sums else "no process to ask"
        found.append({"target": target_path, "source": source, "sha256": wanted, "seen": seen})
    return found


def text(data: Mapping[str, Any]) -> str:
    """What ``Desk.status`` gives, for people."""
    lines = []
    for service in data["services"]:
        if service["error"]:
            lines.append(f"{service['name']}: NOT REACHED, so what runs there is not known")
            continue
        held = f", held by {service['held_by']}" if service["held_by"] else ""
        changed = "trial" if service["trial"] else "committed override" if service["committed"] else "as defined"
        fails = f", FAILED {service['restarts']} TIMES and restarts ({service['result']})" if service["waiting_to_restart"] else ""
        lines.append(f"{service['name']}: {service['state']}, invocation {service['invocation_id'][:8] or '-'}, {changed}{held}{fails}")
        lines += [f"  runs {shlex.join(service['argv'])}"] if service["argv"] else []
        if service["unit_file"]:
            lines.append(f"  UNIT FILE of a rollout's: sha256 {service['unit_file'].partition('-')[0]}")
        lines += [f"  OVERLAY {one['target']}: sha256 {one['sha256'][:16]} ({one['seen']})" for one in service["overlays"]]
    last, known = data["last"], data["verified"]
    lines.append(f"last rollout: {last['id']} {last['state']} ({' '.join(last['edits'])})" if last else "no rollout yet")
    lines += [f"  {last['next']}"] if last and last["next"] else []
    lines.append(
        f"revert target: {known['digest'][:12] or 'recorded'}, verified {known['at_utc']}"
        if known
        else "revert target: none, nothing was ever verified; while it is well: opsctl rollout verify"
    )
    return "\n".join([*lines, *data["out_of_router"].splitlines(), *(f"page owed: {title}" for title in data["owed"])])


def told(last: Mapping[str, Any], services: Sequence[Mapping[str, Any]], lease_s: float, hold_s: float) -> str:
    """``last``: as ``history.summary`` gives it; ``services``: as ``Desk.status`` gives them. The summary's own words where
    the services say nothing more."""
    if last["state"] not in _OPEN:
        return str(last["next"])
    back = [one for one in services if one["reverted_by_deadman"] and one["reverted_by_deadman"]["rollout"] == last["id"]]
    if back:
        who = ", ".join(f"{one['name']} at {one['reverted_by_deadman']['at_utc'] or 'an unknown time'}" for one in back)
        rest = [f"{one['name']}{' (not reached)' if one['error'] else ''}" for one in services if one not in back]
        left = f" Not so, as far as is known: {', '.join(rest)}." if rest else ""
        return (
            f"REVERTED BY THE DEAD-MAN: {who}. Why: nobody renewed the lease for {lease_s:g} s (the command was killed, or its machine or "
            f"the network died). What was committed last runs there.{left} Next: opsctl rollout resume (proves it and closes the rollout)"
        )
    if last["state"] == State.held:
        until = datetime.datetime.fromisoformat(last["ended_utc"]) + datetime.timedelta(seconds=hold_s)
        return (
            f"HELD, it could not be told: {last['why']}. It serves as changed and goes back by itself at {until:%H:%M} UTC. "
            "Next: opsctl rollout resume (looks again, then commits), or opsctl rollout abort"
        )
    if not any(one["error"] or one["trial"] or one["held_by"] for one in services):
        return (
            "its change is on no node any more and no dead-man says that it took it away: the nodes were rebooted, or it was stopped "
            "before anything was changed. Next: opsctl rollout resume (proves what runs and closes the rollout)"
        )
    return str(last["next"])
