"""Follows the process tables of all nodes beside the watch: ranks that died under a living parent, and ranks of an earlier
start that live on. What it cannot see: an engine that gives its processes no titles.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from dataclasses import dataclass, field

from monitors.engines import Dialect
from monitors.judge.members import Members
from monitors.judge.scene import Process
from monitors.observe import process
from monitors.observe.reading import Reading
from monitors.remote import Remote

_EVERY_S = 10.0
_DEADLINE_S = 8.0


@dataclass
class _Node:
    remote: Remote
    members: Members = field(default_factory=Members)
    asked: concurrent.futures.Future[Reading[tuple[Process, ...]]] | None = None
    asked_s: float = -1e9


class Kin:
    """The families of an engine's processes. One with black boxes needs none of it: its boxes name their owners."""

    def __init__(self, remotes: Mapping[str, Remote], dialect: Dialect, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        self._nodes = [] if dialect.black_box else [_Node(remote) for remote in remotes.values()]
        self._dialect = dialect
        self._pool = pool

    def dead(self, now_s: float) -> tuple[Process, ...]:
        """By the last table of each node. A node that does not answer has no dead: its silence is told elsewhere."""
        for node in self._nodes:
            if node.asked is not None and node.asked.done():
                rows, node.asked = node.asked.result().value, None
                if rows is not None:
                    node.members = node.members.look(rows)
            if node.asked is None and now_s - node.asked_s >= _EVERY_S:
                node.asked_s = now_s
                node.asked = self._pool.submit(process.family, node.remote, self._dialect, deadline_s=_DEADLINE_S)
        return tuple(row for node in self._nodes for row in node.members.dead)

    @property
    def orphans(self) -> tuple[Process, ...]:
        return tuple(row for node in self._nodes for row in node.members.orphans)
