"""NCCL's own word in a bundle: a flight recorder's dump of every rank, and what RAS says on each node.

What these cannot see is said in ``observe/collectives.py``: a dump is of its own moment, a rank may be missing, RAS may
call a communicator healthy in the middle of a time-out. Off where the ranks were not started for it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

COLLECTOR = Path(__file__).with_name("onnode_nccl.py")


def flight(remote: Remote, pids: Mapping[str, int], *, deadline_s: float) -> Reading[dict[str, Any]]:
    """By rank: ``{data: bytes, seconds, of}``, or ``{reason, enabled}``."""
    found = _ask(remote, "flight", pids, deadline_s)
    if found.value is None:
        return found
    rows = {}
    for rank, row in found.value.items():
        rows[rank] = {**row, "data": zlib.decompress(base64.b64decode(row["data"]))} if "data" in row else row
    return Reading(rows)


def ras(remote: Remote, pids: Mapping[str, int], *, deadline_s: float) -> Reading[dict[str, Any]]:
    """``{text, address}``, or ``{reason, enabled}``."""
    return _ask(remote, "ras", pids, deadline_s)


def _ask(remote: Remote, what: str, pids: Mapping[str, int], deadline_s: float) -> Reading[dict[str, Any]]:
    try:
        return Reading(remote.collect(what, deadline_s, collector=COLLECTOR, pids=dict(pids), wait_s=max(0.5, deadline_s - 1.0)))
    except NodeError as error:
        return gap(str(error))
