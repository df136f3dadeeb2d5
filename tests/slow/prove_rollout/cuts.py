"""The property in numbers: however opsctl is killed, restarted and killed again, a group ends on one side.

Each seed is one deployment and a few rollouts on it; what a seed gave is kept, so a run that was cut off goes on. Most of
the time of a run is spent waiting for leases, so several seeds may be played at once, each in a process of its own.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.rollout_group import Group
from tests.opsctl.kills import Kills
from tests.opsctl.site import Site


@contextmanager
def contract(seed: int, folder: Path) -> Iterator[Kills]:
    """Two services of the contract server, which boots in milliseconds."""
    site = Site(folder, nodes=2)
    try:
        site.start()
        assert site.rollout("verify").code == 0
        yield Kills(site, seed)
    finally:
        site.close()


@contextmanager
def engine(seed: int, folder: Path) -> Iterator[Kills]:
    """Two ranks of the real engine with a small random model."""
    group = Group(folder)
    try:
        group.start()
        code, _, err = group.rollout("verify")
        assert code == 0, err
        yield Kills(group, seed, leases_s=(6.0, 20.0), longest_s=30.0, deadline_s=120.0, boot_s=90.0, stable_s=1.0)
    finally:
        group.close()


@dataclass(frozen=True)
class Way:
    """``runs``: rollouts on one deployment, about three minutes' worth."""

    make: Callable[[int, Path], AbstractContextManager[Kills]]
    runs: int


WAYS = {"contract": Way(contract, 10), "engine": Way(engine, 3)}


def play(way: str, wanted: int, kept_file: Path, *, jobs: int = 1, begin_within_s: float = float("inf")) -> Counter[str]:
    """Runs until ``wanted`` are kept, ``jobs`` seeds at a time; none is begun after ``begin_within_s``. The count of each end:
    ``new``, ``old``, ``between`` (which must be 0)."""
    kept = _read(kept_file)
    until, seed, due = time.monotonic() + begin_within_s, 0, set[concurrent.futures.Future[tuple[str, list[str], str]]]()
    short = wanted - _count(kept, way)
    if short > 0:
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _ends_in_order) as pool:
            while due or (short > 0 and time.monotonic() < until):
                while short > 0 and len(due) < jobs and time.monotonic() < until:
                    seed += 1
                    if f"{way} {seed}" not in kept:
                        runs = min(WAYS[way].runs, short)
                        due.add(pool.submit(one_seed, way, seed, runs, until))
                        short -= runs
                done, due = concurrent.futures.wait(due, return_when=concurrent.futures.FIRST_COMPLETED)
                for one in done:
                    key, ends, told = one.result()
                    kept |= _read(kept_file) | ({key: ends} if ends else {})  # another run may have written meanwhile
                    kept_file.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(those)}' for name, those in kept.items()) + "\n}\n")
                    print(told, file=sys.stderr, flush=True)
    return Counter(end for key, ends in kept.items() if key.startswith(way) for end in ends)


def _ends_in_order() -> None:
    """Told to end, a deployment is taken down first."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _read(kept_file: Path) -> dict[str, list[str]]:
    return json.loads(kept_file.read_text()) if kept_file.exists() else {}


def _count(kept: dict[str, list[str]], way: str) -> int:
    return sum(len(ends) for key, ends in kept.items() if key.startswith(way))


def one_seed(way: str, seed: int, runs: int, until: float) -> tuple[str, list[str], str]:
    """(key, how each run ended, what there is to say). None begins after ``until`` (monotonic, the same in every process of
    a machine), and one that ends between is the last of its deployment."""
    begun, ends, why = time.monotonic(), list[str](), ""
    with tempfile.TemporaryDirectory(prefix="prove-kills-") as scratch, WAYS[way].make(seed, Path(scratch) / "s") as kills:
        for _ in range(runs):
            if time.monotonic() >= until:
                break
            try:
                ends.append(kills.run())
            except AssertionError as error:
                why = f"prove-rollout: {error}\n"
                ends.append("between")
                break
    key = f"{way} {seed}"
    return key, ends, f"{why}prove-rollout: kills, {key}: {', '.join(ends)} ({time.monotonic() - begun:.0f} s)"


def told(counts: Counter[str], server: str) -> str:
    total = sum(counts.values())
    return f"{total} rollouts cut at drawn moments ({server}): {counts['new']} end new, {counts['old']} old, {counts['between']} between."
