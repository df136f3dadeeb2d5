"""The monitor beside a service that opsctl stops, restarts and reverts: what was ordered pages nobody, what was not does."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import daemon, fleet
from monitors.judge.progress import Limits
from opsctl.service import wait
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import Lease, Override
from opsctl.service.wait import Waiter
from tests.monitors.cluster import HEALTHY, HERE, ROOT, Web, fleet_text, until, web
from tests.opsctl.site import wait_until

WAITER = Waiter(poll_s=0.02)


class Watched:
    """One embedded service of one small rank, and the monitor's watch over it."""

    def __init__(self, folder: Path, server: Web, receiver: Web) -> None:
        self.argv = (sys.executable, str(HERE / "smallrank/rank.py"), str(folder / "run"), "0", "1", "idle")
        env = {"PYTHONPATH": f"{HERE}:{ROOT}", "SPT_NOENV": "1"}
        text = f'argv = {json.dumps(self.argv)}\nnotify = false\nrestart_s = 0.2\nstop_s = 5\nrun_dir = "run"\nlog = "server.log"\n'
        (folder / "small.toml").write_text(
            text + "env = { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in env.items()) + " }\n"
        )
        self.service = EmbeddedService(folder, "small", {**os.environ, "XDG_STATE_HOME": str(folder / "state")})
        self.events: list[dict[str, Any]] = []
        text = fleet_text([("a", folder / "run", folder / "server.log")], server.url, f"json://127.0.0.1:{receiver.port}/", ranks=1)
        whole = fleet.parse(text, "fleet.toml")
        options = daemon.Options(Limits(5.0), 0.1, folder / "monitor", folder / "bundles")
        self.watch = daemon.Watch(whole, whole.one(), options, self.events.append)

    def start(self) -> None:
        seen = len(self.events)
        wait.start([self.service], WAITER, 10)
        self.turn_until(lambda: any(e["event"] == "state" and e["state"] == "idle" for e in self.events[seen:]), "it is seen at rest")

    def turn_until(self, condition: Any, what: str) -> None:
        def turned() -> bool:
            self.watch.turn()
            return bool(condition())

        until(turned, f"{what}; {self.events}", 30)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def close(self) -> None:
        self.watch.close()
        if token := self.service.lease_token():
            self.service.disarm(token)
        self.service.end()
        wait_until(lambda: self.service.ended, what="the supervisor to end")


@pytest.fixture
def receiver() -> Iterator[Web]:
    with web() as server:
        yield server


@pytest.fixture
def watched(tmp_path: Path, receiver: Web) -> Iterator[Watched]:
    (tmp_path / "run").mkdir()
    with web(HEALTHY) as server:
        made = Watched(tmp_path, server, receiver)
        try:
            yield made
        finally:
            made.close()


def test_a_restart_and_a_dead_mans_revert_page_nobody_and_a_kill_does(watched: Watched, receiver: Web) -> None:
    watched.start()
    wait.stop([watched.service], WAITER, 10)
    watched.turn_until(lambda: watched.named("planned_end"), "the ordered end is told")
    assert "told to stop" in watched.named("planned_end")[0]["text"]
    watched.start()

    watched.service.arm(Lease("tok", 0.3))
    watched.service.write_trial(Override(watched.argv, {"MARK": "trial"}))
    watched.turn_until(lambda: watched.named("deadman_reverted"), "the revert is told as one")
    assert "opsctl rollout resume" in watched.named("deadman_reverted")[0]["text"]
    assert not watched.named("crash_declared") and not receiver.posted and len(watched.named("planned_end")) == 1

    watched.turn_until(lambda: watched.service.snapshot().main_pid and watched.named("state")[-1]["state"] == "idle", "the next start")
    os.kill(watched.service.snapshot().main_pid, signal.SIGKILL)
    watched.turn_until(lambda: watched.named("verdict"), "the crash is judged")
    assert watched.named("verdict")[-1]["verdict"] == "crash", "one death, whatever was ordered before it"
    watched.turn_until(lambda: receiver.posted, "the page")
    assert [page["title"] for page in receiver.posted] == ["small: crash"]
