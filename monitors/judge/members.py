"""Which of an engine's processes have died under a parent that lives on? Pure: two looks at the process table.

A parent that does not wait for its children answers health checks for hours with no scheduler behind it. An ordered stop
takes the parent away as well, and a restart gives the children another parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from monitors.judge.scene import Process

_DEAD = frozenset({"Z", "X", "gone"})


@dataclass(frozen=True)
class Members:
    """``alive``: rank processes that were seen, by node and pid; ``missed``: those of them that were not, once; ``dead``:
    those that are gone while their parent lives; ``orphans``: those of an earlier start that live on, without their
    parent, beside their successors. Begin with ``Members()``."""

    alive: Mapping[tuple[str, int], Process] = field(default_factory=dict)
    missed: frozenset[tuple[str, int]] = frozenset()
    dead: tuple[Process, ...] = ()
    orphans: tuple[Process, ...] = ()

    def look(self, rows: tuple[Process, ...]) -> Members:
        """After one more look. A rank is dead when two looks in a row have missed it."""
        now = {(row.node, row.pid): row for row in rows}

        def bereft(row: Process) -> bool:
            seen, parent = now.get((row.node, row.pid)), now.get((row.node, row.ppid))
            return (seen is None or seen.state in _DEAD) and parent is not None and parent.state not in _DEAD

        missed = {key: row for key, row in self.alive.items() if bereft(row)}
        dead = [row for row in self.dead if bereft(row)] + [row for key, row in missed.items() if key in self.missed]
        alive = {key: row for key, row in now.items() if row.rank is not None and row.state not in _DEAD}
        once = {key: row for key, row in missed.items() if key not in self.missed}
        return Members({**alive, **once}, frozenset(once), tuple(dead), _orphans(alive.values()))


def _orphans(rows: Iterable[Process]) -> tuple[Process, ...]:
    """Ranks whose parent is init, where the same rank has another process with a parent of its own. (In a container the
    launcher itself may be init: then all of them have that parent, and none is an orphan.)"""
    same: dict[tuple[str, str], list[Process]] = {}
    for row in rows:
        same.setdefault((row.node, row.title.split(" cfg=")[0]), []).append(row)
    return tuple(row for group in same.values() if len({one.ppid == 1 for one in group}) == 2 for row in group if row.ppid == 1)
