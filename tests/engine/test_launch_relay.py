"""The link between the launchers of a group: who is ready when, and who takes whom down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.config import ConfigError, Settings
from engine.flags import parse
from engine.launch.relay import Hub, PeerEnd, Report, Spoke
from engine.messages import RankInfo
from engine.parallel.secret import GroupSecret
from engine.scheduler.plan import Hello, Stop
from engine.scheduler.rank_link import RankHub, RankSpoke
from tests.e2e.serving import wait_for
from tests.ports import free_port


class Pair:
    """Both ends on this machine; ``node_1`` can come back as another start."""

    def __init__(self, folder: Path, opened: ExitStack, port: int) -> None:
        self._folder, self._opened, self.port = folder, opened, port
        self.silent_s = 30.0
        self.tokens = ["", ""]

    def settings(self, node: int) -> Settings:
        more: list[str] = []
        if self.tokens[node]:
            path = self._folder / f"token-{node}"
            path.write_text(self.tokens[node])
            more = ["--group-token-file", str(path)]
        return parse(["--tp", "2", "--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", f"127.0.0.1:{self.port}", *more])

    def hub(self, start: str) -> Hub:
        made = Hub(self.settings(0), self._folder, start, silent_s=self.silent_s)
        self._opened.callback(made.close)
        return made

    def spoke(self, start: str) -> Spoke:
        made = Spoke(self.settings(1), self._folder, start, silent_s=self.silent_s)
        self._opened.callback(made.close)
        return made

    def meet(self) -> None:
        """Start both, until node 1 has been answered."""
        self.node_0, self.node_1 = self.hub("first"), self.spoke("one")
        wait_for(lambda: self.node_0.turn() or self.node_1.turn() or self.node_1.answered, 5, "an answer")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    port = free_port(4)
    with ExitStack() as opened:
        yield Pair(tmp_path, opened, port)


def test_a_node_is_ready_when_node_0_is(pair: Pair) -> None:
    pair.meet()
    assert not pair.node_1.ready
    pair.node_0.ready = True
    assert wait_for(lambda: pair.node_0.turn() or pair.node_1.turn() or pair.node_1.ready, 5, "readiness") is True


def test_a_node_that_comes_back_as_another_start_takes_the_group_down(pair: Pair) -> None:
    pair.meet()
    again = pair.spoke("two")
    assert wait_for(lambda: again.turn() or pair.node_0.turn(), 5, "its end") == PeerEnd("node 1 was started again")


def test_node_0_that_comes_back_as_another_start_ends_the_others(pair: Pair) -> None:
    pair.meet()
    pair.node_0.close()
    again = pair.hub("second")
    assert wait_for(lambda: again.turn() or pair.node_1.turn(), 5, "its end") == PeerEnd("node 0 was started again")


def test_what_is_left_of_the_group_before_does_not_end_the_new_one(pair: Pair) -> None:
    pair.meet()
    pair.node_0.close()
    again = pair.hub("second")
    wait_for(lambda: again.turn() or pair.node_1.turn(), 5, "the old node's end")
    pair.node_1.end()
    pair.node_1 = pair.spoke("two")
    ends: list[PeerEnd | None] = []
    wait_for(lambda: ends.append(again.turn()) or ends.append(pair.node_1.turn()) or pair.node_1.answered, 5, "an answer")
    assert not any(ends)


def test_an_ordered_end_is_told_both_ways(pair: Pair) -> None:
    pair.meet()
    pair.node_0.end()
    assert wait_for(pair.node_1.turn, 5, "node 1's end") == PeerEnd("node 0 is ending", announced=True)
    pair.node_1.end()
    assert wait_for(pair.node_0.turn, 5, "node 0's end") == PeerEnd("node 1 is ending", announced=True)


def test_silence_ends_the_group(pair: Pair) -> None:
    pair.silent_s = 0.5
    pair.meet()
    assert wait_for(pair.node_0.turn, 5, "node 0's end") == PeerEnd("node 1 has been silent for 0.5 s")
    assert wait_for(pair.node_1.turn, 5, "node 1's end") == PeerEnd("node 0 has been silent for 0.5 s")


def stranger(pair: Pair, *, ending: bool) -> None:
    """Somebody who reaches the port and knows the form of the messages, but not the secret."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(f"tcp://127.0.0.1:{pair.port + 3}")
        socket.send(msgspec.msgpack.encode(Report(1, "somebody", "", time.monotonic_ns(), {1: bytes(65536)}, ending)))
        ends: list[PeerEnd | None] = []
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            ends += [pair.node_0.turn(), pair.node_1.turn()]
            time.sleep(0.01)
    context.term()
    assert not any(ends), ends


def test_with_a_secret_a_stranger_neither_ends_nor_feeds_the_group(pair: Pair, tmp_path: Path) -> None:
    pair.tokens = ["a secret of the group"] * 2
    pair.meet()
    stranger(pair, ending=True)
    stranger(pair, ending=False)
    assert not list(tmp_path.glob("remote-rank-*"))
    pair.node_1.end()
    assert wait_for(pair.node_0.turn, 5, "node 0's end") == PeerEnd("node 1 is ending", announced=True)


def test_a_node_with_another_secret_is_not_answered(pair: Pair) -> None:
    pair.tokens = ["a secret of the group", "a secret of another one"]
    pair.node_0, pair.node_1 = pair.hub("first"), pair.spoke("one")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert (pair.node_0.turn(), pair.node_1.turn()) == (None, None)
        time.sleep(0.01)
    assert not pair.node_1.answered


def test_a_secret_that_is_none_is_refused(pair: Pair) -> None:
    pair.tokens = ["short", "short"]
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        pair.hub("first")
    with pytest.raises(ConfigError, match="no such file"):
        parse(["--tp", "2", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:1", "--group-token-file", "/no/such"])


def test_with_a_secret_the_ranks_of_the_group_meet_and_nobody_takes_the_place_of_one(pair: Pair) -> None:
    pair.tokens = ["a secret of the group"] * 2
    secret, where = GroupSecret.of(pair.settings(0)), f"tcp://127.0.0.1:{pair.port + 2}"
    hello = Hello(RankInfo(1, 0, 0, 1, 0, 1, 7, "d" * 32), 9)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hub = RankHub(context, where, [1], secret)
    thief = RankSpoke(context, where, 1)
    spoke = RankSpoke(context, where, 1, secret)
    try:
        thief.hello(Hello(RankInfo(1, 0, 0, 1, 0, 1, 666, "e" * 32), 1))
        spoke.hello(hello)
        assert hub.gather(5.0) == [hello]
        hub.send(Stop())
        assert spoke.receive(5.0) == Stop() and thief.receive(0.2) is None
    finally:
        for end in (hub, thief, spoke):
            end.close()
        context.term()
