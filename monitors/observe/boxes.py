"""The black boxes of a run directory, here or on another node.

This machine's boxes are mapped and read in this process: it costs microseconds and cannot block. Another node's are
copied together with that node's own monotonic clock, since a box's times mean nothing against any other clock.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import blackbox
from engine.blackbox import BOX_BYTES, BoxError, Snapshot
from monitors.judge.scene import Clock
from monitors.observe import onnode
from monitors.observe.reading import Reading, gap
from monitors.remote import Asked, NodeError

_NO_FOLDER = "no such folder; nothing has started there, or run_dir is wrong"


@dataclass(frozen=True)
class Box:
    """One rank's box. ``state`` is the letter of the process that wrote it, or ``gone``; ``data`` the whole file
    where it was copied."""

    snapshot: Snapshot
    state: str
    data: bytes = field(repr=False, default=b"")

    @property
    def rank(self) -> int:
        return self.snapshot.header.rank


@dataclass(frozen=True)
class NodeBoxes:
    """All boxes of one run directory. ``unreadable`` are lines that say which file and why."""

    node: str
    boxes: tuple[Box, ...]
    clock: Clock
    launcher: Mapping[str, Any] | None
    unreadable: tuple[str, ...] = ()
    exists: bool = True  # the folder


def look(run_dir: str, node: str) -> NodeBoxes:
    """The records (without events) of this machine's boxes, for the poll of an always-on monitor."""
    where = Path(run_dir)
    if not where.is_dir():
        return NodeBoxes(node, (), Clock(time.monotonic_ns(), time.time_ns()), None, (f"{run_dir}: {_NO_FOLDER}",), exists=False)
    found: list[Box] = []
    bad: list[str] = []
    for path in sorted(where.glob("rank-*.box")):
        try:
            snapshot = blackbox.read(path, events=False)
        except BoxError as error:
            bad.append(str(error))
            continue
        header = snapshot.header
        found.append(Box(snapshot, onnode.owner_state(header.pid, 0, header.start_mono_ns)))
    return NodeBoxes(node, tuple(found), Clock(time.monotonic_ns(), time.time_ns()), launcher(where), tuple(bad))


def copy(remote: Asked, run_dir: str, *, deadline_s: float, full: bool = True) -> Reading[NodeBoxes]:
    """The boxes of a node as bytes, with the node's clocks. A gap only when the node did not answer."""
    try:
        answer = remote.collect("boxes", deadline_s, run_dir=run_dir, full=full)
    except NodeError as error:
        return gap(str(error))
    found: list[Box] = []
    bad = [] if answer["exists"] else [f"{run_dir} on node {remote.name}: {_NO_FOLDER}"]
    for item in answer["boxes"]:
        try:
            data = zlib.decompress(base64.b64decode(item["data"]))
            # A copy without its ring is filled up with zeros, which reads as a ring without events.
            snapshot = blackbox.decode(data.ljust(BOX_BYTES, b"\0"), item["file"])
        except (BoxError, zlib.error, binascii.Error) as error:
            bad.append(f"{item['file']} on node {remote.name}: {error}")
            continue
        found.append(Box(snapshot, item["state"], data))
    clock = Clock(answer["clock"]["mono_ns"], answer["clock"]["unix_ns"])
    return Reading(NodeBoxes(remote.name, tuple(found), clock, answer["launcher"], tuple(bad), answer["exists"]))


def launcher(run_dir: Path) -> Mapping[str, Any] | None:
    """``launcher.json``: {pid, invocation_id, api_pid, host, port, ranks: [{rank, pid}]}; None while there is none."""
    try:
        found = json.loads((run_dir / "launcher.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
