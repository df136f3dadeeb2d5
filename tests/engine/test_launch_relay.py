"""The link between the launchers of a group: who is ready when, and who takes whom down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.config import Settings, parse
from engine.launch.relay import Hub, PeerEnd, Spoke
from tests.e2e.serving import wait_for
from tests.ports import free_port


class Pair:
    """Both ends on this machine; ``node_1`` can come back as another start."""

    def __init__(self, folder: Path, opened: ExitStack, port: int) -> None:
        self._folder, self._opened, self._port = folder, opened, port
        self.silent_s = 30.0

    def settings(self, node: int) -> Settings:
        return parse(["--tp", "2", "--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", f"127.0.0.1:{self._port}"])

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
