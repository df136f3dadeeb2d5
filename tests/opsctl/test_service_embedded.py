"""What only the embedded supervisor has to stand: its own death, a full disk's neighbour, a reboot, time-outs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitors import engines
from monitors.observe import batchlog
from opsctl.service import record, wait
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import Lease, Locked, Override, ServiceError, State
from opsctl.service.wait import Deadline, Waiter
from tests.opsctl.site import wait_until

STEADY = Path(__file__).parent / "steady.py"
WAITER = Waiter(poll_s=0.02)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "PATH": os.environ["PATH"],
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "HOME": str(folder),
        }

    def service(self, *args: str, more: str = "") -> EmbeddedService:
        argv = [sys.executable, str(STEADY), "serve", *args]
        (self.folder / "s.toml").write_text(f"argv = {json.dumps(argv)}\nrestart_s = 0.2\nstop_s = 1\n{more}")
        return EmbeddedService(self.folder, "s", self.env)

    def state(self) -> record.ServiceRecord:
        found = record.read(self.folder / "run/lastbatch/s/.supervisor/state.json", record.ServiceRecord)
        assert found is not None
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    service = EmbeddedService(tmp_path, "s", made.env)
    if token := service.lease_token():
        service.disarm(token)
    service.end()
    wait_until(lambda: service.ended, what="the supervisor to end")


def start(service: EmbeddedService) -> str:
    wait.start([service], WAITER, 10)
    WAITER.until("ready", lambda: service.snapshot().state is State.active, 10)
    return service.snapshot().invocation_id


def alive(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes() and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_killed_supervisor_takes_its_service_along_is_seen_and_the_next_start_clears_up(bench: Bench) -> None:
    service = bench.service("--child")
    first = start(service)
    assert len(alive(f"INVOCATION_ID={first}")) == 2
    os.kill(bench.state().supervisor_pid, signal.SIGKILL)
    wait_until(lambda: service.snapshot().state is State.failed, what="the death to be seen")
    assert service.snapshot().result == "supervisor-died" and service.snapshot().main_pid == 0
    wait_until(lambda: len(alive(f"INVOCATION_ID={first}")) == 1, what="the main process to follow its supervisor")
    second = start(service)
    assert alive(f"INVOCATION_ID={first}") == [] and len(alive(f"INVOCATION_ID={second}")) == 2
    assert any("The last supervisor died" in line.text for line in service.log(first))


def test_an_old_trial_is_dropped_at_a_reboot(bench: Bench) -> None:
    service = bench.service("--one")
    start(service)
    service.arm(Lease("t", 60))
    service.write_trial(Override((*service.command().argv, "--trial"), {}))
    os.kill(bench.state().supervisor_pid, signal.SIGKILL)
    wait_until(lambda: service.snapshot().result == "supervisor-died")
    old = bench.state()
    old.boot_id = "another boot"
    record.write(bench.folder / "run/lastbatch/s/.supervisor/state.json", old)
    start(service)
    assert service.read_change().trial is None and service.lease_token() == ""
    assert "--trial" not in service.argv()


def test_a_start_that_is_never_ready_is_killed_at_its_deadline_with_that_result(bench: Bench) -> None:
    service = bench.service("--unready", more="start_s = 0.4\nrestart = false\n")
    wait.start([service], WAITER, 10)
    WAITER.until("the end", lambda: service.snapshot().state is State.failed, 10)
    assert service.snapshot().result == "timeout"


def test_a_watchdog_that_is_not_fed_kills(bench: Bench) -> None:
    service = bench.service(more="watchdog_s = 0.4\nrestart = false\n")
    wait.start([service], WAITER, 10)
    WAITER.until("the end", lambda: service.snapshot().state is State.failed, 10)
    assert service.snapshot().result == "watchdog"


def test_restarts_back_off_while_they_keep_failing(bench: Bench) -> None:
    service = bench.service("--raise")
    wait.start([service], WAITER, 10)
    WAITER.until("three restarts", lambda: service.snapshot().restarts >= 3, 20)
    text = (bench.folder / "run/lastbatch/s/service.log").read_text()
    assert [f"Restarting in {s} s." in text for s in ("0.2", "0.4", "0.8")] == [True, True, True]
    own = [line for line in text.splitlines() if line.startswith("[opsctl] ")]
    assert all(re.search(r" \(20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ\)$", line) for line in own), "when it was"
    found = batchlog.read_text(text.encode(), engines.load("lastbatch"), "service.log")
    assert len(found.starts) >= 4 and all(found.starts), "the monitor still knows them"


def test_a_second_supervisor_is_refused(bench: Bench) -> None:
    service = bench.service()
    start(service)
    pid = bench.state().supervisor_pid
    service._launch()
    assert bench.state().supervisor_pid == pid


def test_an_end_is_refused_while_a_rollout_holds_the_service(bench: Bench) -> None:
    service = bench.service()
    start(service)
    service.arm(Lease("t", 60))
    with pytest.raises(Locked, match="rollout"):
        service.end()
    assert service.snapshot().state is State.active


def test_a_trial_without_a_dead_man_is_refused(bench: Bench) -> None:
    service = bench.service()
    start(service)
    with pytest.raises(ServiceError, match="arm first"):
        service.write_trial(Override(("x",), {}))


def test_the_page_command_of_a_dead_man_runs_after_its_revert(bench: Bench) -> None:
    service = bench.service()
    start(service)
    told = bench.folder / "told"
    service.arm(Lease("t", 0.3, on_expiry=("touch", str(told))))
    wait_until(told.exists, what="the hook")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "argv"),
        ("argv = []", "argv: empty"),
        ("argv = ['x']\nstop_s = 0", "stop_s: 0"),
        ("argv = ['x']\nargs = 1", "args"),
        ("argv = ", "s.toml"),
    ],
)
def test_a_definition_that_cannot_be_used_is_refused_by_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ServiceError, match=says):
        EmbeddedService(tmp_path, "s", {"HOME": str(tmp_path)})


def test_a_wait_says_what_it_waits_for_and_has_a_deadline() -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    said: list[str] = []
    with pytest.raises(Deadline, match="rain: not within 30 s"):
        Waiter(talk=said.append, clock=Clock()).until("rain", lambda: False, 30)
    assert said[0] == "waiting for rain: 8 s so far, 22 s left"
    assert len(said) == 3
