"""The lines of one invocation, from journald.

``_SYSTEMD_INVOCATION_ID`` alone misses what the manager says about the unit ("Main process exited"), which carries
``INVOCATION_ID`` (``USER_INVOCATION_ID`` from a user manager). The last lines of a dying process may carry neither:
those are found by the process ids that the invocation is known to have had.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from monitors.remote import Done
from opsctl.service.manager import Line, ServiceError

_DEADLINE_S = 30.0
_SUPPRESSED = "a596d6fe7bfa4994828e72309e95d61e"  # journald's own "Suppressed N messages from UNIT"


def lines(run: Callable[..., Done], invocation_id: str, *, user: bool, container_id: str = "",
          last_s: float | None = None) -> tuple[Line, ...]:  # fmt: skip
    """Every line, oldest first; those of a container that the service runs as well, where its id is given. ``last_s``: only
    those of so many seconds, by the node's own clock.

    Raises ServiceError when the journal cannot be read."""
    run("journalctl", "--sync", deadline_s=_DEADLINE_S)  # needs root; without it the last second may be missing
    manager = "USER_INVOCATION_ID" if user else "INVOCATION_ID"
    since = [f"--since=-{math.ceil(last_s)}s"] if last_s is not None else []
    found = _query(run, [*since, f"_SYSTEMD_INVOCATION_ID={invocation_id}", "+", f"{manager}={invocation_id}",
                         "+", f"MESSAGE_ID={_SUPPRESSED}", f"OBJECT_SYSTEMD_INVOCATION_ID={invocation_id}",
                         *(("+", f"CONTAINER_ID_FULL={container_id}") if container_id else ())])  # fmt: skip
    pids = sorted({entry["_PID"] for entry in found if entry.get("_SYSTEMD_INVOCATION_ID") == invocation_id and "_PID" in entry})
    if found and pids:
        after = ["--after-cursor", str(found[0]["__CURSOR"])]
        late = _query(run, [*after, *(f"_PID={pid}" for pid in pids)])
        known = {entry["__CURSOR"] for entry in found}
        found += [entry for entry in late if entry["__CURSOR"] not in known and "_SYSTEMD_INVOCATION_ID" not in entry]
        found.sort(key=lambda entry: (int(entry["__MONOTONIC_TIMESTAMP"]), str(entry["__CURSOR"])))
    return tuple(
        Line(_message(entry), int(entry.get("_PID", 0)), manager in entry or lost, lost)
        for entry in found for lost in (entry.get("MESSAGE_ID") == _SUPPRESSED,)
    )  # fmt: skip


def _query(run: Callable[..., Done], arguments: list[str]) -> list[dict[str, Any]]:
    done = run("journalctl", "-o", "json", "--all", "--no-pager", "-q", *arguments, deadline_s=_DEADLINE_S)
    if done.code:
        raise ServiceError(f"journalctl: {done.err or f'exit status {done.code}'}; is the reader in the group systemd-journal?")
    return [json.loads(line) for line in done.out.splitlines() if line]


def _message(entry: dict[str, Any]) -> str:
    """A message with bytes that are no UTF-8, or with colours, comes as a list of numbers."""
    message = entry.get("MESSAGE")
    if isinstance(message, list) and all(isinstance(part, int) for part in message):
        return bytes(message).decode(errors="replace")
    if isinstance(message, list):
        return "\n".join(str(part) for part in message)
    return "" if message is None else str(message)
