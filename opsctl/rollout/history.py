"""What the journals of a deployment tell: a line for each rollout, and one of them in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from opsctl.rollout.journal import Entry, Journal, State

_NEXT = {
    State.held: "held: opsctl rollout resume, or opsctl rollout abort",
    State.stuck: "STUCK: look at the services; opsctl rollout abort tries the revert again",
}
_CUT_OFF = "cut off or under way: if nobody is at it, opsctl rollout resume, or opsctl rollout abort"


def summary(entry: Journal) -> dict[str, Any]:
    made = entry.plan
    whys = [e.data["why"] for e in entry.entries if e.data.get("why")]
    first = entry.entries[0]
    done = entry.state.final and entry.state is not State.stuck
    return {
        "id": entry.id, "state": str(entry.state), "edits": list(made.edits), "reason": made.reason, "why": whys[-1] if whys else "",
        "began_utc": first.at_utc, "ended_utc": entry.entries[-1].at_utc, "by": first.data.get("by", ""), "who": first.data.get("who", {}),
        "states": [str(e.state) for e in entry.entries if not e.event],
        "next": "" if done or entry.state is State.planned else _NEXT.get(entry.state, _CUT_OFF),
    }  # fmt: skip


def summaries(paths: Sequence[Path], opened: Callable[[Path], Journal]) -> list[dict[str, Any]]:
    """What each journal says; one that cannot be read is told as such and hides nothing else."""
    found = []
    for path in paths:
        try:
            found.append(summary(opened(path)))
        except ValueError as error:
            found.append({"id": path.stem, "state": "unreadable", "edits": [], "reason": "", "why": str(error), "began_utc": "",
                          "ended_utc": "", "by": "", "who": {}, "states": [], "next": ""})  # fmt: skip
    return found


def full(entry: Journal) -> tuple[dict[str, Any], str]:
    """One rollout as data and as text."""
    made, about = entry.plan, summary(entry)
    entries: list[dict[str, Any]] = [msgspec.to_builtins(one) for one in entry.entries]
    for one in entries:
        one.pop("plan", None)
    data = {**about, "plan": {**msgspec.to_builtins(made), "digest": made.digest, "diff": made.diff()}, "entries": entries}
    lines = [f"rollout {entry.id}: {' '.join(made.edits)}: {about['state']}", f"by {about['by']} {_who(about['who'])}".rstrip(),
             f"reason: {made.reason or 'none given'}", "", made.diff(), ""]  # fmt: skip
    lines += [_line(one) for one in entry.entries]
    result = next((one.data["result"] for one in reversed(entry.entries) if "result" in one.data), None)
    if result is not None:
        lines += ["", result]
    return data, "\n".join(lines)


def _who(who: dict[str, str]) -> str:
    return f"({', '.join(f'{key} {value}' for key, value in who.items() if value)})" if any(who.values()) else ""


def _value(value: Any) -> str:
    """As people read it; what has names (invocations by service) as pairs."""
    return ", ".join(f"{name} {str(one)[:8]}" for name, one in value.items()) if isinstance(value, dict) else str(value)


def _line(one: Entry) -> str:
    told = {key: value for key, value in one.data.items() if key in ("why", "by", "reason", "invocations", "group", "service") and value}
    words = "  ".join(f"{key}: {_value(value)}" for key, value in told.items())
    return f"{one.at_utc}  {one.state:<10} {one.event}{' ' if one.event else ''}{words}".rstrip()
