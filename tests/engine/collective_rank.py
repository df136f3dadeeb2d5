"""A rank that makes collectives as a scenario says, in a process of its own; run by test_parallel_group.py.

    python -m tests.engine.collective_rank SETTINGS.json RANK SCENARIO BOX_PATH

It prints one line when it has joined, and one with its result. What it does in a scenario, on a stream as a real rank
does: ``sum`` checks results; ``mismatch`` and ``skip`` let rank 1 go wrong at its third collective, with the main
thread waiting for the stream's event.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch

from engine.blackbox import BlackBox, CollectiveKind, Header
from engine.config import Settings
from engine.exec.device import open_device
from engine.parallel.group import Group, open_group


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(group: Group) -> str:
    """Every result checked against the same sum made here; the digest of all is equal on all ranks."""
    digest = hashlib.sha256()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        for count in (1, 7, 576, 4 * 576, 700_001):
            x = values(group.rank, count, dtype)
            group.all_reduce(x)
            expected = sum(values(r, count, dtype).float() for r in range(group.world))
            assert (x.float() - expected).abs().max() <= tolerance, f"{dtype} {count}"
            digest.update(x.view(torch.uint8).numpy().tobytes())
    for shape in ((3, 5), (2, 200_000)):
        x = values(group.rank, shape[0] * shape[1], torch.float32).view(shape)
        gathered = group.all_gather(x)
        expected = torch.cat([values(r, shape[0] * shape[1], torch.float32).view(shape) for r in range(group.world)], -1)
        assert torch.equal(gathered, expected)
        digest.update(gathered.numpy().tobytes())
    return digest.hexdigest()


def speed(group: Group) -> str:
    x = torch.ones(4 * 576)
    taken = []
    for _ in range(2000):
        begun = time.perf_counter_ns()
        group.all_reduce(x)
        taken.append((time.perf_counter_ns() - begun) / 1e3)
        x.fill_(1)
    taken.sort()
    return f"all_reduce of [4, 576] f32: median {taken[1000]:.0f} us, p99 {taken[1980]:.0f} us"


def wrong(group: Group, what: str) -> None:
    """Six collectives of which rank 1 spoils the third."""
    count = 0

    def spoil(kind: CollectiveKind, x: torch.Tensor) -> torch.Tensor | None:
        nonlocal count
        count += 1
        if group.rank != 1 or count != 3:
            return x
        return None if what == "skip" else torch.ones(x.numel() + 64)

    group.intercept = spoil
    for number in range(6):
        x = torch.full((4, 576), float(number + 1))
        group.all_reduce(x)
        if what == "skip" and number == 5:
            return


def main(settings_path: str, rank_text: str, scenario: str, box_path: str) -> None:
    torch.set_num_threads(1)
    settings = Settings.from_json(Path(settings_path).read_text())
    rank = int(rank_text)
    box = BlackBox(Path(box_path), Header(os.getpid(), rank, settings.parallel.tp, settings.digest))
    group = open_group(settings, rank, box, torch.device("cpu"))
    print("joined", group.paths()["collectives"], flush=True)
    if scenario == "sum":
        group.barrier(30)
        print("result", sums(group), flush=True)
        group.barrier(30)
        group.close()
        return
    if scenario == "speed":
        group.barrier(30)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        print("result", speed(group), flush=True)
        group.close()
        return
    device = open_device("cpu", 0)
    device.stream.launch(lambda: wrong(group, scenario))
    device.stream.record().synchronize()
    print("result passed", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
