"""The black boxes of all ranks, as this node sees them: its own, and the relayed copies of other nodes' ranks.

A relay writes ``remote-rank-<n>.box`` with all times converted to this host's clock, so one age rule serves both. What
a copy cannot show is whether its writer still lives; there the record's age must do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import blackbox


@dataclass(frozen=True)
class RankReading:
    """A rank's box, or why there is none. ``local``: its process runs on this host."""

    rank: int
    snapshot: blackbox.Snapshot | None
    reason: str = ""
    local: bool = True


def read_ranks(run_directory: Path, world: int) -> list[RankReading]:
    """One reading for each rank of ``0..world-1``; a missing or unreadable box is a reading too."""
    return [_read(run_directory, rank) for rank in range(world)]


def faults_of(reading: RankReading, *, now_mono_ns: int, max_age_s: float, alive: Callable[[int], bool] | None = None) -> list[str]:
    """Why this rank is not well; empty: it is.

    ``now_mono_ns`` is CLOCK_MONOTONIC; ``alive`` says whether a process of this host lives.
    """
    if reading.snapshot is None:
        return [reading.reason]
    found: list[str] = []
    pid = reading.snapshot.header.pid
    if reading.local and not (alive or process_lives)(pid):
        found.append(f"rank {reading.rank}: its process {pid} is dead")
    age = reading.snapshot.age_s(now_mono_ns)
    if age > max_age_s:
        phase = reading.snapshot.host.phase.name
        found.append(f"rank {reading.rank}: its record is {age:.1f} s old, in phase {phase}; at most {max_age_s:g} s")
    return found


def is_dead(reading: RankReading) -> bool:
    """Whether the rank has left a box on this host and its process is gone."""
    return reading.snapshot is not None and reading.local and not process_lives(reading.snapshot.header.pid)


def process_lives(pid: int) -> bool:
    """Whether a process of this host runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _read(run_directory: Path, rank: int) -> RankReading:
    own, copy = run_directory / f"rank-{rank}.box", run_directory / f"remote-rank-{rank}.box"
    local = own.exists() or not copy.exists()
    path = own if local else copy
    if not os.path.lexists(path):
        return RankReading(rank, None, f"rank {rank}: no black box in {run_directory}")
    try:
        return RankReading(rank, blackbox.read(path, events=False), local=local)
    except blackbox.BoxError as error:
        return RankReading(rank, None, f"rank {rank}: {error}", local)
