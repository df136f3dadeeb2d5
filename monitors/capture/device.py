"""Evidence of the machine under the ranks: clocks and tools, the kernel's words, network counters, device core dumps.

What these cannot see: a kernel ring that has wrapped, counters of a switch, a device whose driver hangs with it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

COLLECTOR = Path(__file__).with_name("onnode.py")


@dataclass(frozen=True)
class Facts:
    """``offset_s`` is the node's clock minus ours, right within ``within_s`` (half the time that asking took); ``zone_s`` how
    far its local time is ahead of UTC."""

    node: str
    offset_s: float
    within_s: float
    host: str
    synchronized: str
    tools: dict[str, str]
    zone_s: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"offset_s": round(self.offset_s, 4), "within_s": round(self.within_s, 4), "host": self.host, "ntp": self.synchronized,
                "zone_s": self.zone_s}  # fmt: skip


def facts(remote: Remote, *, deadline_s: float) -> Reading[Facts]:
    asked = time.time()
    found = _ask(remote, "facts", deadline_s, py_spy=remote.py_spy)
    answered = time.time()
    if found.value is None:
        return gap(found.reason)
    value = found.value
    middle, half = (asked + answered) / 2, abs(answered - asked) / 2
    tools = {key: str(text) for key, text in value["tools"].items() if text}
    return Reading(Facts(remote.name, value["unix_ns"] / 1e9 - middle, half, value["host"], value["synchronized"], tools,
                         int(value["zone_s"])))  # fmt: skip


def kernel(remote: Remote, *, deadline_s: float) -> Reading[str]:
    """Lines of the kernel's ring that speak of devices, memory and links; empty text when there are none."""
    found = _ask(remote, "kernel", deadline_s)
    if found.value is None:
        return gap(found.reason)
    if "reason" in found.value:
        return gap(found.value["reason"])
    return Reading("".join(f"{line}\n" for line in found.value["lines"]))


def network(remote: Remote, *, deadline_s: float) -> Reading[str]:
    found = _ask(remote, "network", deadline_s)
    return gap(found.reason) if found.value is None else Reading(json.dumps(found.value, indent=1))


def core_dump(remote: Remote, pids: list[int], *, deadline_s: float) -> Reading[dict[int, Any]]:
    found = _ask(remote, "core_dump", deadline_s, pids=pids, wait_s=max(1.0, deadline_s - 2.0))
    return gap(found.reason) if found.value is None else Reading({int(pid): item for pid, item in found.value.items()})


def _ask(remote: Remote, what: str, deadline_s: float, **arguments: Any) -> Reading[Any]:
    try:
        return Reading(remote.collect(what, deadline_s, collector=COLLECTOR, **arguments))
    except NodeError as error:
        return gap(str(error))
