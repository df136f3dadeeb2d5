"""The property in numbers: however opsctl is killed, restarted and killed again, a group ends on one side.

Each seed is one deployment and ``RUNS`` rollouts on it; what a seed gave is kept, so a run that was cut off goes on.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.e2e.rollout_group import Group
from tests.opsctl.kills import Kills
from tests.opsctl.site import Site

RUNS = 10


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


WAYS: dict[str, Callable[[int, Path], AbstractContextManager[Kills]]] = {"contract": contract, "engine": engine}


def play(way: str, wanted: int, kept_file: Path) -> Counter[str]:
    """Runs until ``wanted`` are kept. The count of each end: ``new``, ``old``, ``between`` (which must be 0)."""
    kept: dict[str, list[str]] = json.loads(kept_file.read_text()) if kept_file.exists() else {}
    seed = 0
    while sum(len(ends) for key, ends in kept.items() if key.startswith(way)) < wanted:
        seed += 1
        key = f"{way} {seed}"
        if key in kept:
            continue
        begun, ends = time.monotonic(), []
        with tempfile.TemporaryDirectory(prefix="prove-kills-") as scratch, WAYS[way](seed, Path(scratch) / "s") as kills:
            for _ in range(min(RUNS, wanted)):
                try:
                    ends.append(kills.run())
                except AssertionError as error:
                    print(f"prove-rollout: {error}", file=sys.stderr, flush=True)
                    ends.append("between")
                    break
        kept[key] = ends
        kept_file.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"prove-rollout: kills, {key}: {', '.join(ends)} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    return Counter(end for key, ends in kept.items() if key.startswith(way) for end in ends)


def told(counts: Counter[str], server: str) -> str:
    total = sum(counts.values())
    return f"{total} rollouts cut at drawn moments ({server}): {counts['new']} end new, {counts['old']} old, {counts['between']} between."
