"""How a server begins and ends: ready only when it works, an end for every death, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.serving import Served, serving, start, wait_for
from tests.ports import free_port
from tests.tiny_models import tiny_model

PLAIN = ("--grammar-backend", "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


def in_background(served: Served, **body: Any) -> list[httpx.Response]:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            try:
                answers.append(
                    client.post("/v1/completions", json={"prompt": "once upon a time", "temperature": 0, "ignore_eos": True, **body})
                )
            except httpx.HTTPError:
                return

    threading.Thread(target=ask, daemon=True).start()
    return answers


def gone(family: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)


def test_sigterm_finishes_what_runs_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--tp", "2") as served:
        family = served.descendants()
        answers = in_background(served, max_tokens=60)
        wait_for(lambda: served.box(0).host.held, 10, "the request to arrive")
        assert served.stop() == 0, served.text()
        wait_for(lambda: answers, 5, "the answer")
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert gone(family)
        assert not served.run_dir.exists()
        assert not [path for path in Path("/dev/shm").iterdir() if "lastbatch" in path.name]


@pytest.mark.parametrize("victim", ["rank", "api"])
def test_a_killed_process_ends_the_server_with_evidence_and_a_reason(model: Path, tmp_path: Path, victim: str) -> None:
    with serving(model, tmp_path, *PLAIN, "--tp", "2") as served:
        family = served.descendants()
        pid = served.rank_pid(1) if victim == "rank" else served.described["api_pid"]
        answers = in_background(served, max_tokens=900)
        wait_for(lambda: served.box(0).host.running, 10, "the request to run")
        os.kill(pid, signal.SIGKILL)
        assert served.process.wait(30) == 1
        if victim == "rank":
            wait_for(lambda: answers, 5, "an answer to the request that ran")
            assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "engine_ended")
        assert f"(pid {pid}) ended with signal SIGKILL" in served.text()
        assert gone(family)
        folder = next(served.run_dir.glob("evidence-*"))
        assert (folder / "rank-0.box").is_file()
        if victim == "api":
            assert "MainThread" in (folder / "stacks-0.txt").read_text()


def test_nothing_outlives_a_killed_launcher(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--tp", "2") as served:
        family = served.descendants()
        served.process.kill()
        wait_for(lambda: gone(family), 10, "the end of all processes")
    again = start(model, tmp_path, PLAIN)
    try:
        again.wait_ready()
        assert (again.run_dir / "previous" / "rank-0.box").is_file()
        again.complete()
    finally:
        assert again.stop() == 0


def test_the_watchdog_saves_the_stacks_of_a_frozen_rank_and_ends_the_server(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--tp", "2", "--watchdog-timeout", "3") as served:
        family = served.descendants()
        os.kill(served.rank_pid(1), signal.SIGSTOP)
        assert served.process.wait(60) == 1
        assert "rank 1 has not moved for" in served.text()
        folder = next(served.run_dir.glob("evidence-*"))
        assert "follow (engine/scheduler/worker.py" in (folder / "stacks-1.txt").read_text()
        assert gone(family)


def test_a_server_that_stands_still_is_stopped_at_once_with_evidence(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--tp", "2", "--watchdog-timeout", "0") as served:
        os.kill(served.rank_pid(1), signal.SIGSTOP)
        wait_for(lambda: served.box(1).age_s(time.monotonic_ns()) > 9, 20, "a time of standing still")
        begun = time.monotonic()
        assert served.stop() == 1
        assert time.monotonic() - begun < 15
        assert "rank 1 has not moved for 8 s" in served.text()
        assert list(served.run_dir.glob("evidence-*/stacks-1.txt"))


def test_a_frozen_api_process_does_not_hold_up_the_end(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN) as served:
        os.kill(served.described["api_pid"], signal.SIGSTOP)
        begun = time.monotonic()
        assert served.stop() == 1
        assert time.monotonic() - begun < 12
        assert "is stopped (state T) and is killed" in served.text()


def test_a_server_that_wedges_while_it_drains_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--tp", "2", "--watchdog-timeout", "0") as served:
        in_background(served, max_tokens=900)
        wait_for(lambda: served.box(0).host.running, 10, "the request to run")
        os.kill(served.rank_pid(1), signal.SIGSTOP)
        begun = time.monotonic()
        assert served.stop() == 1
        assert time.monotonic() - begun < 20
        assert "has not moved for 8 s: there is nothing to wait for" in served.text()
        assert list(served.run_dir.glob("evidence-*/stacks-1.txt"))


def test_a_second_ctrl_c_ends_a_drain_at_once_and_clients_are_told(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--enable-faults", "--fault", "decode.slow:factor=200") as served:
        answers = in_background(served, max_tokens=900)
        wait_for(lambda: served.box(0).host.running, 10, "the request to run")
        served.process.send_signal(signal.SIGINT)
        wait_for(lambda: "requests in flight get at most 30 s; Ctrl-C again ends now" in served.text(), 5, "the line that says so")
        wait_for(lambda: "shutting down: 1 requests in flight" in served.text(), 5, "the drain")
        time.sleep(0.6)  # what follows sooner is the same press, passed on by a wrapper
        begun = time.monotonic()
        assert served.stop(signal.SIGINT) == 130
        assert time.monotonic() - begun < 15
        wait_for(lambda: answers, 5, "the answer")
        assert answers[0].json()["error"]["code"] == "engine_ended"


def test_an_idle_server_is_left_alone_by_its_watchdog(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN, "--watchdog-timeout", "1") as served:
        wait_for(lambda: served.box(0).host.beats > 40, 20, "a time of idling")
        served.complete()
        assert served.process.poll() is None


def test_ready_is_said_to_the_service_manager_after_the_warm_up_and_watchdog_while_fresh(model: Path, tmp_path: Path) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    said: list[str] = []
    with serving(model, tmp_path, *PLAIN, env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}) as served:
        while "WATCHDOG=1" not in said:
            said += manager.recv(4096).decode().splitlines()
        assert said.index("READY=1") < said.index("WATCHDOG=1")
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in said[: said.index("READY=1")])
        assert served.text().index("Warm-up plain done") < served.text().index("Ready: configuration")
        line = next(line for line in served.text().splitlines() if "Ready: configuration" in line)
        port = served.described["port"]
        for part in (f"http://127.0.0.1:{port}, ", " cpu, float32, tp 1, ", "context 1024 tokens", "KV pool 32768 tokens (0.02 GB a rank)",
                     f"run directory {served.run_dir}"):  # fmt: skip
            assert part in line, line
        os.kill(served.rank_pid(0), 0)
    manager.close()


def test_two_nodes_serve_one_model_and_end_together(model: Path, tmp_path: Path) -> None:
    port = free_port(4)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    group = (*PLAIN, "--tp", "3", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}", "--group-token-file", str(token))
    three = tiny_model(tmp_path / "three", heads=6, kv_heads=3, hidden=96)
    follower = start(three, tmp_path, (*group, "--node-rank", "1"), name="follower")
    try:
        with serving(three, tmp_path, *group, "--node-rank", "0", name="leader") as leader:
            follower.wait_ready()
            assert leader.complete()["usage"]["completion_tokens"] == 8
            with leader.client as client:
                found = client.get("/health_scheduler")
                assert found.status_code == 200, found.text
                assert [one["node"] for one in found.json()["ranks"]] == [0, 0, 1]
                assert [one["rank"] for one in client.get("/server_info").json()["ranks"]] == [0, 1, 2]
            assert leader.stop() == 0
        assert follower.process.wait(30) == 75
        assert "node 0 is ending" in follower.text()
    finally:
        if follower.process.poll() is None:
            follower.process.kill()
            follower.process.wait(10)


def test_a_lost_node_takes_the_group_down(model: Path, tmp_path: Path) -> None:
    port = free_port(4)
    group = (*PLAIN, "--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}")
    follower = start(model, tmp_path, (*group, "--node-rank", "1"), name="follower")
    try:
        with serving(model, tmp_path, *group, "--node-rank", "0", name="leader") as leader:
            follower.wait_ready()
            follower.process.kill()
            assert leader.process.wait(40) in (1, 75)
    finally:
        follower.process.kill()
        follower.process.wait(10)


def test_a_second_server_in_the_same_run_directory_is_refused(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *PLAIN) as served:
        second = start(model, tmp_path, PLAIN)
        assert second.process.wait(30) == 2
        served.complete()


def test_a_port_that_is_taken_is_named(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        served = start(model, tmp_path, (*PLAIN, "--port", str(port)))
        assert served.process.wait(60) == 1
        assert f"--port {port}: cannot listen" in served.text()
        assert not list(served.run_dir.glob("evidence-*"))


def test_a_setting_that_a_rank_finds_to_be_no_good_is_a_line_and_no_evidence(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    served = start(broken, tmp_path, PLAIN)
    assert served.process.wait(60) == 2
    assert "model.safetensors" in served.text() and "Traceback" not in served.text()
    assert not list(served.run_dir.glob("evidence-*"))
