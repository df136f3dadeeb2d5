"""How a rollout that has not ended stands, for the person who finds it: who went back, when, why, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opsctl.rollout.journal import State

_OPEN = [str(state) for state in State if not state.final and state is not State.planned]


def told(last: Mapping[str, Any], services: Sequence[Mapping[str, Any]], lease_s: float) -> str:
    """``last``: as ``history.summary`` gives it; ``services``: as ``Desk.status`` gives them. The summary's own words where
    the services say nothing more."""
    if last["state"] not in _OPEN:
        return str(last["next"])
    back = [one for one in services if one["reverted_by_deadman"] and one["reverted_by_deadman"]["rollout"] == last["id"]]
    if back:
        who = ", ".join(f"{one['name']} at {one['reverted_by_deadman']['at_utc'] or 'an unknown time'}" for one in back)
        rest = [one["name"] for one in services if one not in back]
        left = f" Not so: {', '.join(rest)}." if rest else ""
        return (
            f"REVERTED BY THE DEAD-MAN: {who}. Why: nobody renewed the lease for {lease_s:g} s (the command was killed, or its machine or "
            f"the network died). What was committed last runs there.{left} Next: opsctl rollout resume (proves it and closes the rollout)"
        )
    if not any(one["trial"] or one["held_by"] for one in services):
        return (
            "its change is on no node any more and no dead-man says that it took it away: the nodes were rebooted, or it was stopped "
            "before anything was changed. Next: opsctl rollout resume (proves what runs and closes the rollout)"
        )
    return str(last["next"])
