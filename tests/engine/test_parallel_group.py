"""Collectives among real processes: results, what a mismatch and a skip do, and what is left behind."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from engine import blackbox
from engine.blackbox import CollectiveKind, DeviceState
from engine.config import LaunchSettings, ParallelSettings, Settings
from engine.parallel.group import Group, GroupError, open_group
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


@dataclass
class Ranks:
    processes: list[subprocess.Popen[str]]
    logs: list[Path]
    boxes: list[Path]

    def lines(self, rank: int, word: str) -> list[str]:
        return [line for line in self.logs[rank].read_text().splitlines() if line.startswith(word)]

    def await_all(self, what: str, good: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all(good(rank) for rank in range(len(self.processes))):
            assert time.monotonic() < deadline, f"{what}: not reached; {[log.read_text()[-2000:] for log in self.logs]}"
            time.sleep(0.02)

    def results(self) -> list[str]:
        self.await_all("end", lambda rank: self.processes[rank].poll() is not None)
        assert [process.returncode for process in self.processes] == [0] * len(self.processes), [log.read_text() for log in self.logs]
        return [self.lines(rank, "result")[0] for rank in range(len(self.processes))]

    def await_parked(self) -> None:
        """All are in a collective, asleep, and stay there."""

        def stuck(rank: int) -> bool:
            if not self.boxes[rank].exists():
                return False
            device = blackbox.read(self.boxes[rank]).device
            return device.state is DeviceState.collective and device.enqueued == device.completed + 1

        def still() -> list[tuple[int, int]]:
            return [(d.enqueued, d.completed) for d in (blackbox.read(box).device for box in self.boxes)]

        self.await_all("parked", stuck)
        before, since, until = still(), time.monotonic(), time.monotonic() + 20
        while time.monotonic() - since < 0.5:  # one that was seen in an earlier collective goes on
            if (now := still()) != before:
                before, since = now, time.monotonic()
            assert time.monotonic() < until, "the ranks go on"
            time.sleep(0.05)
        begun, cpu = time.monotonic(), self._cpu_s()
        while time.monotonic() - begun < 1.5:
            assert all(process.poll() is None for process in self.processes)
            assert still() == before
            time.sleep(0.1)
        assert self._cpu_s() - cpu < 0.3, "a rank that waits for ever must sleep"

    def _cpu_s(self) -> float:
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self.processes)

    def stream_frames(self, rank: int) -> list[str]:
        """The Python frames of the rank's stream thread, innermost first, without line numbers."""
        py_spy = str(Path(sys.executable).with_name("py-spy"))
        done = subprocess.run([py_spy, "dump", "--pid", str(self.processes[rank].pid)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        thread = done.stdout.split("device-stream", 1)[1].split("Thread ", 1)[0]
        return [line.strip().split(":")[0] for line in thread.splitlines()[1:] if line.strip()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[subprocess.Popen[str]] = []

    def _start(scenario: str, world: int, nodes: int = 1, env: dict[str, str] | None = None, given_address: bool = False) -> Ranks:
        address = f"127.0.0.1:{free_port(4)}" if nodes > 1 or given_address else ""
        ranks = Ranks([], [], [])
        for rank in range(world):
            settings = Settings(
                parallel=ParallelSettings(tp=world, nnodes=nodes, dist_init_addr=address, rendezvous_timeout_s=40),
                launch=LaunchSettings(run_dir=str(tmp_path)),
            )
            node = dataclasses.replace(settings.parallel, node_rank=settings.node_of(rank))
            path = tmp_path / f"settings-{rank}.json"
            path.write_text(dataclasses.replace(settings, parallel=node).to_json())
            ranks.logs.append(tmp_path / f"rank-{rank}.log")
            ranks.boxes.append(tmp_path / f"rank-{rank}.box")
            with ranks.logs[-1].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.engine.collective_rank", str(path), str(rank), scenario, str(ranks.boxes[-1])],
                    stdout=log, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                )  # fmt: skip
            ranks.processes.append(process)
            started.append(process)
        return ranks

    yield _start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)


WITHOUT_C = {"LASTBATCH_NATIVE": "0"}


@pytest.mark.parametrize(
    ("world", "nodes", "env", "implementation"),
    [
        pytest.param(2, 1, {}, "shared memory, C", id="2 ranks, C"),
        pytest.param(3, 1, WITHOUT_C, "shared memory, Python", id="3 ranks, no compiler"),
        pytest.param(2, 2, {}, "one rank a host; TCP between 2 nodes", id="2 nodes of 1"),
        pytest.param(4, 2, {}, "shared memory, C; TCP between 2 nodes", id="2 nodes of 2"),
        pytest.param(3, 2, WITHOUT_C, "TCP between 2 nodes", id="2 nodes of 2 and 1, no compiler"),
    ],
)
def test_sums_and_gathers_are_right_and_the_same_to_the_bit_on_every_rank(
    start: Callable[..., Ranks], world: int, nodes: int, env: dict[str, str], implementation: str
) -> None:
    ranks = start("sum", world, nodes, env)
    results = ranks.results()
    assert len(set(results)) == 1
    assert implementation in ranks.lines(0, "joined")[0]
    for box in ranks.boxes:
        snapshot = blackbox.read(box)
        assert snapshot.device.enqueued == snapshot.device.completed == 17
        kinds = [CollectiveKind(event.sub) for event in snapshot.events if event.kind is blackbox.EventKind.collective_enqueued]
        assert kinds == [CollectiveKind.all_reduce] * 15 + [CollectiveKind.all_gather] * 2


@pytest.mark.parametrize(
    ("world", "nodes", "env"),
    [
        pytest.param(3, 1, {}, id="one node, C"),
        pytest.param(3, 1, WITHOUT_C, id="one node, no compiler"),
        pytest.param(2, 2, {}, id="two nodes"),
    ],
)
def test_a_rank_that_enters_with_another_size_parks_all_ranks_for_ever(
    start: Callable[..., Ranks], world: int, nodes: int, env: dict[str, str]
) -> None:
    ranks = start("mismatch", world, nodes, env)
    ranks.await_parked()
    sizes = []
    for box in ranks.boxes:
        snapshot = blackbox.read(box)
        assert (snapshot.device.enqueued, snapshot.device.completed) == (3, 2)
        opened = snapshot.open_collective()
        assert opened is not None
        sizes.append(opened.b)
    assert sizes == [4 * 4 * 576, 4 * (4 * 576 + 64), *[4 * 4 * 576] * (world - 2)]


def test_the_frames_of_a_mismatch_are_those_of_a_normal_wait(start: Callable[..., Ranks]) -> None:
    ranks = start("mismatch", 2, 2)
    ranks.await_parked()
    frames = [ranks.stream_frames(rank) for rank in (0, 1)]
    assert frames[0][0].startswith("_receive (engine/parallel/star.py")
    assert frames[1][0] == frames[0][0]
    outer = [[frame for frame in stack if "group.py" in frame] for stack in frames]
    assert outer[0] == outer[1]


@pytest.mark.parametrize(("world", "nodes"), [pytest.param(3, 1, id="one node"), pytest.param(2, 2, id="two nodes")])
def test_a_skipped_collective_shifts_the_sequence_and_leaves_the_others_waiting(
    start: Callable[..., Ranks], world: int, nodes: int
) -> None:
    ranks = start("skip", world, nodes)
    others = [rank for rank in range(world) if rank != 1]
    ranks.await_all("rank 1 to pass", lambda rank: rank != 1 or bool(ranks.lines(1, "result")))
    ranks.await_all("the others to enter", lambda rank: rank == 1 or blackbox.read(ranks.boxes[rank]).device.enqueued == 6)
    devices = [blackbox.read(box).device for box in ranks.boxes]
    assert (devices[1].enqueued, devices[1].completed) == (5, 5)
    assert all((devices[rank].enqueued, devices[rank].completed) == (6, 5) for rank in others)
    assert all(not ranks.lines(rank, "result") for rank in others)


def test_the_shared_block_has_no_name_so_nothing_is_left_when_ranks_are_killed(start: Callable[..., Ranks]) -> None:
    ranks = start("mismatch", 2)
    ranks.await_parked()
    for rank, process in enumerate(ranks.processes):
        maps = [line.split(maxsplit=5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
        shared = {part[5] for part in maps if part[1][3] == "s" and len(part) > 5}
        assert "/memfd:lastbatch-collectives (deleted)" in shared
        named = {path for path in shared if path.startswith("/") and not path.startswith(("/memfd:", "/usr/"))}
        assert named == {str(ranks.boxes[rank])}


def test_a_broken_connection_between_nodes_raises_on_the_other_node(start: Callable[..., Ranks]) -> None:
    ranks = start("skip", 2, 2)
    ranks.await_all("rank 0 to wait for rank 1", lambda rank: bool(ranks.lines(1, "result")) and ranks.boxes[rank].exists())
    ranks.processes[1].kill()
    deadline = time.monotonic() + DEADLINE_S
    while ranks.processes[0].poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ranks.processes[0].returncode == 1
    assert "closed its connection in the middle of a collective" in ranks.logs[0].read_text()


def test_ranks_that_do_not_come_are_named_when_the_time_is_up(tmp_path: Path) -> None:
    settings = Settings(
        parallel=ParallelSettings(tp=2, nnodes=2, dist_init_addr=f"127.0.0.1:{free_port(4)}", rendezvous_timeout_s=0.3),
        launch=LaunchSettings(run_dir=str(tmp_path)),
    )
    with pytest.raises(GroupError, match=r"ranks \[1\] did not reach"):
        open_group(settings, 0, None, torch.device("cpu"))


def test_local_ranks_that_do_not_come_are_named_when_the_time_is_up(tmp_path: Path) -> None:
    settings = Settings(parallel=ParallelSettings(tp=3, rendezvous_timeout_s=0.3), launch=LaunchSettings(run_dir=str(tmp_path)))
    with pytest.raises(GroupError, match=r"local ranks \[1, 2\] have not come"):
        open_group(settings, 0, None, torch.device("cpu"))


def test_a_group_of_one_has_no_collectives() -> None:
    group = open_group(Settings(), 0, None, torch.device("cpu"))
    x = torch.arange(4.0)
    group.intercept = lambda kind, tensor: pytest.fail("nothing is entered")
    group.all_reduce(x)
    assert torch.equal(x, torch.arange(4.0))
    assert group.all_gather(x) is x
    group.barrier(0.1)
    group.close()
    assert isinstance(group, Group)
    assert group.paths() == {"collectives": "none: one rank"}


def test_a_tensor_that_is_not_contiguous_is_refused(start: Callable[..., Ranks]) -> None:
    group = Group(0, 2)
    with pytest.raises(ValueError, match="not contiguous"):
        group.all_reduce(torch.ones(3, 4).t())
