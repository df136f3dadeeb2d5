"""An SGLang server as its signals show it, with a clock of the test's: lines that end at rest, gauges that lag."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monitors import fleet
from monitors.judge.progress import Limits, Memory, Source, State, advance
from monitors.lookout import Lookout
from tests.monitors.cluster import Web, until, web

DECODE = "[2026-03-01 10:00:{:02d} TP0] Decode batch, #running-req: 2, #token: 90, token usage: 0.04, cuda graph: True, gen throughput (token/s): 80.0, #queue-req: 0\n"  # noqa: E501
METRICS = "sglang:num_running_reqs {}\nsglang:num_queue_reqs 0\nsglang:realtime_tokens_total {}\n"


@dataclass
class Watched:
    """Looks once a second of its own clock, and judges as the daemon does."""

    log: Path
    server: Web
    lookout: Lookout
    now: list[float]
    memory: Memory = field(default_factory=Memory)

    def look(self, seconds: int = 1) -> State:
        for _ in range(seconds):
            self.now[0] += 1.0
            look = self.lookout.look(quiet_s=self.memory.quiet_s)
            waiting = [job for job in (self.lookout._page, self.lookout._probe) if job is not None]
            until(lambda jobs=waiting: all(job.done() for job in jobs), "what was asked of the server")
            self.memory, judgement = advance(self.memory, look.sample, Limits())
        return judgement.state

    def line(self) -> None:
        with self.log.open("a") as file:
            file.write(DECODE.format(int(self.now[0]) % 60))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    log = tmp_path / "server.log"
    log.touch()
    with web({"/health": (200, "")}) as server:
        text = f'[deployment.s]\nengine = "sglang"\napi = "{server.url}"\nservice = "embedded"\n[[deployment.s.node]]\nname = "a"\n'
        text += f'[[deployment.s.node.service]]\nunit = "s"\nlog = "{log}"\nranks = [0]\n'
        now = [1000.0]
        lookout = Lookout(fleet.parse(text, "fleet.toml").one(), lambda: now[0])
        yield Watched(log, server, lookout, now)
        lookout.close()


def work(watched: Watched, lines: int = 20) -> None:
    for _ in range(lines):
        watched.line()
        assert watched.look(3) is State.busy


def test_a_server_known_by_lines_alone_is_asked_whether_it_rests(watched: Watched) -> None:
    watched.server.pages["/health_generate"] = (200, "")
    work(watched)
    assert watched.look(150) is State.idle, "the last line says 2 running, and a token comes"
    work(watched, 3)


def test_one_that_gives_no_token_is_stalled(watched: Watched) -> None:
    watched.server.pages["/health_generate"] = (503, "")
    work(watched)
    assert watched.look(60) is State.stalled


def test_gauges_that_lag_behind_the_last_token_are_no_stall_and_a_stuck_server_is(watched: Watched) -> None:
    for tokens in range(20):
        watched.server.pages["/metrics"] = (200, METRICS.format(2, 100 * tokens))
        watched.look(4)
    assert watched.lookout.look().sample.source is Source.steps
    assert watched.look(33) is State.busy, "the gauge may be old for so long"
    watched.server.pages["/metrics"] = (200, METRICS.format(0, 1900))
    assert watched.look(5) is State.idle
    watched.server.pages["/metrics"] = (200, METRICS.format(2, 2000))
    watched.look(5)
    assert watched.look(45) is State.stalled


def test_a_gauge_that_is_stuck_at_0_is_not_believed_and_said_to_lie(watched: Watched) -> None:
    for tokens in range(8):
        watched.server.pages["/metrics"] = (200, METRICS.format(0, 100 * tokens))
        watched.line()
        watched.look(3)
    look = watched.lookout.look()
    assert any("not believed" in text for text in look.gaps) and look.sample.held == 2


def test_a_server_that_answers_nothing_does_not_hold_up_the_look(watched: Watched) -> None:
    stuck = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
    watched.lookout.deployment = watched.lookout.deployment.model_copy(update={"api": f"http://127.0.0.1:{stuck.getsockname()[1]}"})
    try:
        for _ in range(3):
            watched.line()
        begun = time.monotonic()
        for _ in range(40):
            watched.now[0] += 1.0
            watched.lookout.look(quiet_s=20.0)
        assert time.monotonic() - begun < 20
        assert watched.lookout._probe is not None and watched.lookout._page is not None, "both are still asked"
    finally:
        stuck.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:
                stuck.accept()[0].close()
        stuck.close()
