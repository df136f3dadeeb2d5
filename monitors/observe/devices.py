"""The GPUs of a whole deployment, looked at beside the watch, and what they tell of work: learned bands, signs.

This machine's are asked in a thread of its own, another node's through its collector and less often. An answer that
does not come is a gap; the watch never waits for one.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from dataclasses import dataclass

from monitors.judge import power
from monitors.judge.power import Bands, Load
from monitors.observe import cards
from monitors.observe.cards import Card
from monitors.observe.reading import Reading
from monitors.remote import Remote

_EVERY_S = 5.0
_IN_DOUBT_S = 2.0
_ELSEWHERE_S = 15.0
_NONE_THERE_S = 300.0
_DEADLINE_S = 10.0
_FRESH_S = 12.0


@dataclass
class _Node:
    remote: Remote
    here: cards.Here | None
    asking: concurrent.futures.Future[Reading[tuple[Card, ...]]] | None = None
    asked_s: float = -1e9
    seen_s: float = -1e9
    cards: tuple[Card, ...] = ()
    reason: str = ""


class Devices:
    """``bands`` is what was learned; whoever owns this keeps it on disk."""

    def __init__(self, remotes: Mapping[str, Remote], pool: concurrent.futures.Executor, bands: Bands) -> None:
        self.bands = bands
        self._pool = pool
        self._nodes = [_Node(remote, cards.Here(name) if remote.local else None) for name, remote in remotes.items()]

    def turn(self, now: float, *, in_doubt: bool) -> None:
        """Take what has come and ask again where it is time to."""
        for node in self._nodes:
            reading = self._answer(node)
            if reading is not None:
                node.cards, node.reason = reading.value or (), reading.reason
                node.seen_s = now if reading.value else node.seen_s
            every = (_IN_DOUBT_S if in_doubt else _EVERY_S) if node.here else _ELSEWHERE_S
            never = node.seen_s < 0 and node.reason
            if now - node.asked_s >= (_NONE_THERE_S if never else every):
                self._ask(node, now)

    def cards(self, now: float) -> tuple[Card, ...]:
        """The latest readings that are not old."""
        return tuple(
            card for node in self._nodes if now - node.seen_s <= (_FRESH_S if node.here else 2 * _ELSEWHERE_S) for card in node.cards
        )

    def signs(self, now: float) -> tuple[bool, bool]:
        """Whether one spins, and whether they work."""
        return power.all_seen(self.bands, [card.draw for card in self.cards(now)])

    def learn(self, now: float, load: Load) -> bool:
        """Learn from the readings of this moment, each once; whether there were any."""
        fresh = [card.draw for node in self._nodes if node.seen_s == now for card in node.cards]
        if fresh:
            self.bands = power.learn(self.bands, fresh, load)
        return bool(fresh)

    def xids(self) -> list[tuple[str, int, int]]:
        """The drivers' errors on this machine since the last call: (node, index of the GPU, Xid)."""
        return [(node.remote.name, index, xid) for node in self._nodes if node.here for index, xid in node.here.xids()]

    @property
    def gaps(self) -> list[str]:
        """Nodes whose GPUs were read before and are not any more. That a node has none is no gap."""
        return [f"GPUs of node {node.remote.name}: {node.reason}" for node in self._nodes if node.reason and node.seen_s > 0]

    def close(self) -> None:
        for node in self._nodes:
            if node.here:
                node.here.close()

    def _ask(self, node: _Node, now: float) -> None:
        if node.here:
            node.here.ask()
            node.asked_s = now
        elif node.asking is None:
            node.asking = self._pool.submit(cards.sample, node.remote, deadline_s=_DEADLINE_S)
            node.asked_s = now

    def _answer(self, node: _Node) -> Reading[tuple[Card, ...]] | None:
        if node.here:
            return node.here.poll()
        if node.asking is None or not node.asking.done():
            return None
        asked, node.asking = node.asking, None
        return asked.result()
