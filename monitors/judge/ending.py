"""How does a start of a server end: told to stop, or of what? From its log, in order. Pure.

An order is told by the service manager ("Stopping ...") or by the server ("Ending: SIGTERM"). An order that comes when
the server has died already is none, and what a server says of itself while it is ended is no reason why it ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from monitors.judge.scene import BatchLine, Log, Notice, Traceback

OF_A_STOP = frozenset({"KeyboardInterrupt", "SystemExit", "CancelledError", "GeneratorExit", "BrokenPipeError", "ClientDisconnect"})
WATCHDOG = "watchdog"
_EXIT = "exit: "
_ORDERED = ("0", "15", "143", "TERM", "SUCCESS")  # statuses of a process that did as it was told
_BEGINS = frozenset({"started", "loading", "ready"})
_DIES = frozenset({"killed", "crash", "device_lost", "native_frames"})
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_LONGEST = 160

_Item = Notice | Traceback | BatchLine


def asked_for(notice: Notice) -> bool:
    """Whether an exit is one that somebody ordered, by its status."""
    return notice.kind == "exit" and notice.fields.get("status", "").split("/")[0] in _ORDERED


def words(text: str) -> str:
    """A line without its numbers: two lines that say the same of other processes are equal."""
    return _NUMBERS.sub("#", text.partition("\n")[0])[:_LONGEST]


def alike(one: str, other: str) -> bool:
    """Whether two causes are the same as far as they are known: who has only an exit status, or nothing, may have died
    of the same as another of that kind."""
    return one == other or ("" in (one, other) and (one + other).startswith(_EXIT))


@dataclass(frozen=True)
class Ending:
    """Of the present start. Begin with ``Ending()``. ``cause`` is what its log says that it dies of, in words that are
    equal for equal ends; ``dead``: it has. ``begun``: another start has begun, whose own lines will take the place.
    ``died``: how many starts did so, without an order, in the lines that were taken last."""

    order: Notice | None = None
    cause: str = ""
    dead: bool = False
    invocation: str = ""
    begun: bool = False
    died: int = 0

    def take(self, log: Log) -> Ending:
        """After some more lines."""
        state, died = Ending() if self.begun else self, 0
        for item in _items(log):
            fresh = state.renewed(item)
            state = fresh.after(item)
            died += state.dead and not fresh.dead
        return replace(state, died=died)

    def tells(self, notice: Notice) -> bool:
        """Whether this line, one of those that were taken last, may tell of an end that nobody ordered."""
        ends = notice.kind == "restart" or (notice.kind == "exit" and not asked_for(notice))
        return ends and (self.dead or self.died > 0)

    def renewed(self, item: _Item) -> Ending:
        """This one, or an empty one when the line is the first that another start says of its own end."""
        if isinstance(item, BatchLine):
            return self
        other = bool(item.invocation and self.invocation and item.invocation != self.invocation)
        begins = isinstance(item, Notice) and item.kind in _BEGINS
        return Ending() if other or (self.begun and not begins) else self

    def after(self, item: _Item) -> Ending:
        """With one more line of the same start, or the one by which the next begins."""
        if isinstance(item, BatchLine):
            # A server that works on has survived what looked like its end.
            return self if self.order or self.dead or not item.progress else replace(self, cause="")
        state = replace(self, invocation=item.invocation or self.invocation)
        if isinstance(item, Notice) and item.kind in _BEGINS:
            return replace(state, begun=True) if state.order or state.cause or state.dead else state
        if isinstance(item, Traceback):
            named = item.kind and item.kind.rpartition(".")[2] not in OF_A_STOP
            return state._of(words(f"{item.kind}: {item.message}")) if named else state
        if item.kind == "stopping":
            # A process may hear SIGTERM from a parent that ends it for what went wrong before.
            late = state.dead or (item.fields.keys() & {"signal", "signal2"} and state.cause)
            return state if late or state.order else replace(state, order=item)
        if state.order:
            return state
        if item.kind == "restart":
            return replace(state, dead=True)
        if item.kind == "exit" and not asked_for(item):
            return replace(state._of(_EXIT + words(item.fields.get("status") or item.text)), dead=True)
        if item.kind in ("watchdog", "memory"):
            return state._of(item.kind)
        return state._of(words(item.text)) if item.kind in _DIES else state

    def _of(self, cause: str) -> Ending:
        """The first reason is why; an exit status is one only where there is no other."""
        if self.order or (self.cause and not self.cause.startswith(_EXIT)):
            return self
        return replace(self, cause=self.cause if self.cause and cause.startswith(_EXIT) else cause)


def deaths(log: Log) -> list[str]:
    """The cause of each start that died in this log without an order, oldest first."""
    state, found = Ending(), list[str]()
    for item in _items(log):
        fresh = state.renewed(item)
        if state.dead and fresh is not state:
            found.append(state.cause)
        state = fresh.after(item)
    return [*found, state.cause] if state.dead else found


def others(log: Log) -> int:
    """How many of a log's deaths are none of the last one's kind: of another cause, or by the hand of a watchdog."""
    found = deaths(log)
    return sum(1 for cause in found[:-1] if cause == WATCHDOG or not alike(cause, found[-1]))


def present(log: Log) -> Log:
    """Without the notices and tracebacks of lives that ended because they were told to: whatever went wrong in them is no
    reason for what is wrong in the one that somebody started since."""
    state, begun = Ending(), 0
    for item in _items(log):
        fresh = state.renewed(item)
        after = fresh.after(item)
        if state.order and not state.begun and (fresh is not state or after.begun):
            begun = item.cite.line
        state = after
    if not begun:
        return log
    return replace(log, notices=tuple(n for n in log.notices if n.cite.line >= begun),
                   tracebacks=tuple(t for t in log.tracebacks if t.cite.line >= begun))  # fmt: skip


def order(log: Log) -> Notice | None:
    """The line by which the last start in this log was told to stop; None when it was not, or another has begun since."""
    state = Ending().take(log)
    return None if state.begun else state.order


def _items(log: Log) -> Iterator[_Item]:
    merged: list[_Item] = [*log.notices, *log.tracebacks, *log.batches]
    yield from sorted(merged, key=lambda item: item.cite.line)
