"""What a unit's journal says of its starts. Pure: entries as ``journalctl -o json`` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"  # systemd's message ids, `journalctl --catalog`
_STARTED = "39f53479d3a045ac8e11786248231fbf"
_EXITED = "98e322203f7a4ed290d09fe03c09fe15"
_TRACEBACK = "Traceback (most recent call last):"

Entry = Mapping[str, Any]


class Starts(msgspec.Struct, frozen=True):
    """``failed``: starts whose main process ended before the unit was up."""

    begun: int
    failed: int


def starts(entries: Sequence[Entry], since_s: float) -> Starts:
    """Of starts that began at ``since_s`` (Unix time) or later."""
    begun: dict[str, bool] = {}  # invocation -> whether it came up
    ended: set[str] = set()
    for entry in entries:
        invocation = str(entry.get("INVOCATION_ID", ""))
        if _second(entry) < since_s or not invocation:
            continue
        kind = entry.get("MESSAGE_ID")
        if kind == _STARTING:
            begun.setdefault(invocation, False)
        elif kind == _STARTED and invocation in begun:
            begun[invocation] = True
        elif kind == _EXITED and begun.get(invocation) is False:
            ended.add(invocation)
    return Starts(len(begun), len(ended))


def tracebacks(entries: Sequence[Entry]) -> int:
    """Python tracebacks that begin in these entries, whichever start wrote them."""
    return sum(1 for entry in entries if isinstance(entry.get("MESSAGE"), str) and _TRACEBACK in entry["MESSAGE"])


def _second(entry: Entry) -> float:
    return int(entry["__REALTIME_TIMESTAMP"]) / 1e6
