"""Everything that NVML says of a node's GPUs at one moment. A quantity that cannot be read is a gap with NVML's reason.

What it cannot see: which kernel runs. Utilisation says that one was there, not that it did anything.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monitors.judge.power import Draw
from monitors.observe import onnode
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

_THROTTLES = {  # NVML's bits for why the clocks are not higher
    0x1: "idle", 0x2: "clock setting", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "thermal, by software", 0x40: "thermal, by hardware", 0x80: "power brake", 0x100: "display",
}  # fmt: skip
_HOLDS_DOWN = 0x8 | 0x20 | 0x40 | 0x80
_NUMBERS = ("util", "mem_util", "power_w", "limit_w", "sm_mhz", "mem_mhz", "pcie_rx_mb_s", "pcie_tx_mb_s", "temperature_c")


@dataclass(frozen=True)
class Card:
    """One GPU. Utilisations in percent, clocks in MHz, PCIe in MiB/s over the last 20 ms; None: not read, and ``gaps``
    says why."""

    node: str
    index: int
    uuid: str
    name: str
    source: str
    util: float | None = None
    mem_util: float | None = None
    power_w: float | None = None
    limit_w: float | None = None
    sm_mhz: float | None = None
    mem_mhz: float | None = None
    pcie_rx_mb_s: float | None = None
    pcie_tx_mb_s: float | None = None
    temperature_c: float | None = None
    throttle_bits: int | None = None
    gaps: Mapping[str, str] = field(default_factory=dict)

    @property
    def throttle(self) -> tuple[str, ...]:
        """Why the clocks are held down, in words."""
        bits = self.throttle_bits or 0
        return tuple(word for bit, word in _THROTTLES.items() if bits & bit)

    @property
    def draw(self) -> Draw:
        """As the judge of power reads it."""
        key = self.uuid or f"{self.node}:{self.index}"
        return Draw(key, self.util, self.mem_util, self.power_w, self.limit_w, bool((self.throttle_bits or 0) & _HOLDS_DOWN))


def sample(remote: Remote, *, deadline_s: float) -> Reading[tuple[Card, ...]]:
    """All GPUs of a node, read by a process of its own there."""
    try:
        return from_answer(remote.collect("gpus", deadline_s), remote.name)
    except NodeError as error:
        return gap(str(error))


def from_answer(answer: Mapping[str, Any], node: str) -> Reading[tuple[Card, ...]]:
    """What ``onnode.gpus`` gives, as cards."""
    if "reason" in answer:
        return gap(str(answer["reason"]))
    return Reading(tuple(
        Card(node, int(row["index"]), str(row.get("uuid") or ""), str(row.get("name") or ""), str(row.get("source") or ""),
             **{name: float(row[name]) for name in _NUMBERS if row.get(name) is not None},
             throttle_bits=row.get("throttle_bits"), gaps=dict(row.get("gaps", {})))
        for row in answer["rows"]
    ))  # fmt: skip


class Here:
    """This machine's GPUs, asked in a thread: a driver in trouble may never answer, and the watch must not wait. NVML
    is asked again only when the last question has been answered."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._asking: concurrent.futures.Future[dict[str, Any]] | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="nvml")
        self._xids: list[tuple[int, int]] = []

    def ask(self) -> None:
        """Ask, unless a question is open."""
        if self._asking is None:
            self._asking = self._pool.submit(onnode.gpus, keep=True)

    def poll(self) -> Reading[tuple[Card, ...]] | None:
        """The answer, once; None while there is none."""
        if self._asking is None or not self._asking.done():
            return None
        asked, self._asking = self._asking, None
        try:
            answer = asked.result()
            self._xids += [(int(one["index"]), int(one["xid"])) for one in answer.get("xids", ())]
            return from_answer(answer, self._node)
        except Exception as error:  # whatever a vendor's library raises is a reading, not the end of the watch
            return gap(f"NVML: {type(error).__name__}: {error}")

    def xids(self) -> list[tuple[int, int]]:
        """The driver's errors that have come since the last call, each once: (index of the GPU, Xid)."""
        found, self._xids = self._xids, []
        return found

    @property
    def waiting(self) -> bool:
        return self._asking is not None and not self._asking.done()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
