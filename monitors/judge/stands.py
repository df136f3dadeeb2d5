"""Where a thread stands: what its stack means once each frame's mark is known.

Marks come from the dialect (data). What several marks in one stack mean together is decided here, in one table, from
the most telling pair downward.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from monitors.engines import Dialect
from monitors.judge.scene import Cite, Frame, Thread


class Standing(enum.StrEnum):
    host_callback = "in a host callback"
    grammar_barrier = "at the grammar barrier"
    collective = "in a collective"
    device_wait = "waiting for the device"
    barrier = "at a barrier of the start-up"
    transfer = "at the KV transfer's queue"
    grammar = "in grammar code on the host"
    parse = "tokenising or parsing text"
    load = "loading"
    compile = "compiling"
    reply = "waiting for a worker's reply"
    receive = "waiting for work"
    idle = "idle"
    driver = "inside the device driver"
    read = "in a read"
    host = "on the host"
    unknown = "unknown"


_MEANING: tuple[tuple[frozenset[str], Standing], ...] = (
    (frozenset({"callback"}), Standing.host_callback),
    (frozenset({"device_wait", "grammar"}), Standing.grammar_barrier),
    # Who waits for a worker's reply does so whatever call the message comes through.
    (frozenset({"reply"}), Standing.reply),
    # A collective by which requests are handed out is a wait for work, whatever library call it is made of.
    (frozenset({"collective", "receive"}), Standing.receive),
    (frozenset({"barrier"}), Standing.barrier),
    (frozenset({"collective"}), Standing.collective),
    (frozenset({"device_wait"}), Standing.device_wait),
    (frozenset({"sync"}), Standing.device_wait),
    (frozenset({"compile"}), Standing.compile),
    (frozenset({"parse"}), Standing.parse),
    (frozenset({"grammar"}), Standing.grammar),
    (frozenset({"receive"}), Standing.receive),
    (frozenset({"idle"}), Standing.idle),
    (frozenset({"transfer"}), Standing.transfer),
    (frozenset({"launch_callback"}), Standing.driver),
    (frozenset({"driver"}), Standing.driver),
    (frozenset({"read"}), Standing.read),
    (frozenset({"load"}), Standing.load),
)
WAITING = frozenset({Standing.grammar_barrier, Standing.collective, Standing.device_wait, Standing.barrier})
ELSEWHERE = frozenset({Standing.receive, Standing.idle, Standing.reply})
BUSY = frozenset(
    {Standing.compile, Standing.driver, Standing.read, Standing.host, Standing.grammar, Standing.parse, Standing.load, Standing.transfer}
)
# What keeps a thread's processor busy whether or not anything comes of it.
COMPUTING = frozenset({Standing.compile, Standing.host, Standing.grammar, Standing.parse})


@dataclass(frozen=True)
class Stand:
    """``site`` is the place in the engine, as (function, line) from the marked call outward: two ranks in one
    collective have one site. ``where`` is for people."""

    standing: Standing
    where: str
    cite: Cite
    site: tuple[tuple[str, int], ...] = ()
    marks: frozenset[str] = frozenset()


def stand_of(thread: Thread, dialect: Dialect) -> Stand:
    """Where a thread stands, by all the marks in its stack."""
    if not thread.frames:
        return Stand(Standing.unknown, "no Python frame", thread.cite)
    marked = [(i, mark) for i, frame in enumerate(thread.frames) if (mark := dialect.mark(frame.function, frame.file))]
    # A place that reads a value back from the device waits there only when it is the innermost frame.
    marked = [(i, mark) for i, mark in marked if mark != "sync" or i == 0]
    marks = {mark for _, mark in marked}
    for needed, standing in _MEANING:
        if needed <= marks:
            here = [i for i, mark in marked if mark in needed]
            first, last = thread.frames[here[0]], thread.frames[here[-1]]
            # Frames inside the call itself (its retry loop, its poll) differ from moment to moment; those outside do not.
            site = tuple((_name(frame), frame.line) for frame in thread.frames[here[-1] + 1 :])
            return Stand(standing, _where(first, last), first.cite, ((_name(last), 0), *site), frozenset(marks))
    top = thread.frames[0]
    return Stand(Standing.host, _where(top, top), top.cite, tuple((_name(frame), frame.line) for frame in thread.frames), frozenset(marks))


def _name(frame: Frame) -> str:
    """The function without its class: two dumps of one place must compare equal."""
    return frame.function.rsplit(".", 1)[-1]


def _where(first: Frame, last: Frame) -> str:
    text = f"{first.function} ({first.file}{f':{first.line}' if first.line else ''})"
    return text if first is last else f"{text} under {last.function} ({last.file}{f':{last.line}' if last.line else ''})"
