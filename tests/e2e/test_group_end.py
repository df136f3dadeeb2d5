"""How a group of two nodes ends when one or both are told to: no answer is cut off, whoever hears it first."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Served, serving, start, wait_for
from tests.ports import free_port
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@contextlib.contextmanager
def two_nodes(model: Path, folder: Path) -> Iterator[tuple[Served, Served]]:
    """Node 0 and node 1 of a group that serves."""
    port = free_port(4)
    group = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}", "--grammar-backend", "none", "--enable-faults")
    follower = start(model, folder, (*group, "--node-rank", "1"), name="follower")
    try:
        with serving(model, folder, *group, "--node-rank", "0", name="leader") as leader:
            follower.wait_ready()
            yield leader, follower
    finally:
        if follower.process.poll() is None:
            follower.process.kill()
        follower.process.wait(10)


@pytest.mark.parametrize("both", [True, False], ids=["both", "follower"])
def test_a_stop_lets_running_requests_finish(model: Path, tmp_path: Path, both: bool) -> None:
    with two_nodes(model, tmp_path) as (leader, follower):
        leader.arm("decode.slow:factor=8")
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(leader.complete(max_tokens=200)["usage"]["completion_tokens"]))
        asking.start()
        wait_for(lambda: leader.box(0).host.running, 20, "the request to run")
        follower.process.send_signal(signal.SIGTERM)
        if both:
            leader.process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert answers == [200], leader.text()[-3000:] + follower.text()[-3000:]
        assert leader.process.wait(30) == (0 if both else 75), leader.text()
        assert follower.process.wait(30) == 0, follower.text()
        for one in (leader, follower):
            assert "Traceback" not in one.text()
            assert not one.run_dir.exists()


def test_a_stop_before_ready_is_at_once(model: Path, tmp_path: Path) -> None:
    served = start(model, tmp_path, ("--enable-faults", "--fault", "boot.hang"))
    try:
        wait_for(lambda: "Loaded" in served.text() or served.process.poll() is not None, 60, "the load")
        begun = time.monotonic()
        assert served.stop() == 0, served.text()
        assert time.monotonic() - begun < 20
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait(10)
