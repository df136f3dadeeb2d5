"""When the launcher calls a rank stuck: real boxes, an injected clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine import blackbox
from engine.blackbox import BlackBox, Header, Phase, Snapshot
from engine.launch.watchdog import Lying

SECOND = 1_000_000_000


@dataclass
class Pair:
    """Two ranks' boxes, written as a rank writes them, and the launcher's looks at them once a second."""

    leader: BlackBox
    follower: BlackBox
    lying: Lying = field(default_factory=Lying)
    now_ns: int = 10 * SECOND

    def boxes(self) -> dict[int, Snapshot]:
        return {rank: blackbox.read(box.path) for rank, box in ((0, self.leader), (1, self.follower))}

    def hold(self, held: int, compiling: int = 0) -> None:
        self.leader.counters["grammar_waiting"] = compiling
        self.leader.publish()
        self.leader.beat(held=held)

    def look(self, seconds: int = 1) -> float:
        for _ in range(seconds):
            self.leader.enter(Phase.idle)
            self.now_ns += SECOND
            self.lying = self.lying.look(self.boxes(), self.now_ns)
        return self.lying.lain_s


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = [BlackBox(tmp_path / f"rank-{rank}.box", Header(1, rank, 2, "d", tp=rank)) for rank in (0, 1)]
    yield Pair(*made)
    for box in made:
        box.close()


def test_work_that_lies_while_every_rank_beats_is_counted(pair: Pair) -> None:
    pair.look(30)
    pair.hold(1)
    assert pair.look(31) == 30


def test_a_long_queue_that_moves_is_none(pair: Pair) -> None:
    pair.hold(500)
    for step in range(1, 50):
        pair.leader.beat(step=step, progress=True)
        assert pair.look() == 0


def test_a_long_forward_pass_that_reaches_layers_is_none(pair: Pair) -> None:
    pair.hold(1)
    pair.follower.device_begin(1)
    for layer in range(40):
        pair.follower.device_layer(layer)
        assert pair.look() == 0


def test_a_grammar_that_compiles_for_long_is_none_unless_others_wait_beside_it(pair: Pair) -> None:
    pair.hold(2, compiling=2)
    assert pair.look(600) == 0
    pair.hold(3, compiling=2)
    assert pair.look(60) == 59


def test_clients_that_give_up_and_try_again_do_not_hide_it(pair: Pair) -> None:
    for _ in range(10):
        pair.hold(1)
        pair.look(10)
        pair.hold(0)
        pair.look(3)
    assert pair.look() == 90


def test_a_launcher_that_was_held_up_itself_has_seen_only_a_moment(pair: Pair) -> None:
    pair.hold(1)
    pair.look(2)
    pair.now_ns += 3600 * SECOND
    assert pair.look() <= 7
