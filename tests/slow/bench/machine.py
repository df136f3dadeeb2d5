"""The machine that a figure was taken on, and who else was using it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Load:
    """``others``: share of all cores in use while nothing of ours runs; ``steal``: share the host gave to other guests."""

    one_minute: float
    others: float
    steal: float

    def __str__(self) -> str:
        return f"load {self.one_minute:.2f}; before the part {self.others:.0%} of the cores were in use by others, {self.steal:.0%} stolen"


def load(over_s: float = 1.0) -> Load:
    """To be called while servers of ours stand idle. The load average also counts what we did a minute ago."""
    before = _ticks()
    time.sleep(over_s)
    spent = [after - earlier for after, earlier in zip(_ticks(), before, strict=True)]
    user, nice, system, _idle, _iowait, irq, softirq, steal = spent
    whole = max(sum(spent), 1)
    return Load(os.getloadavg()[0], (user + nice + system + irq + softirq) / whole, steal / whole)


def _ticks() -> list[int]:
    return [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]


def describe(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    text = cpuinfo.read_text()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    features = [word for word in ("avx512_bf16", "amx_bf16") if word in text.split()]
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} cores, {' and '.join(features) or 'no bf16 instructions'}"
