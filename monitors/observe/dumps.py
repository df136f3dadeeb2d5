"""Stacks that are not py-spy's: faulthandler, gdb, and the dumps that an engine's watchdog prints into its log."""

from __future__ import annotations

import re

from monitors.engines import Dialect
from monitors.judge.scene import Cite, Frame, Stack, Thread
from monitors.observe import stacks
from monitors.observe.envelope import unwrap

_FAULT_THREAD = re.compile(
    r"^(?P<now>Current thread|Thread) (?P<tid>0x[0-9a-fA-F]+)(?: \[(?P<name>[^\]]{1,80})\])? \(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^\s+File "(?P<file>[^"]{1,500})", line (?P<line>\d+) in (?P<function>\S{1,200})')
_GDB_THREAD = re.compile(r'^Thread (?P<n>\d+) \(Thread 0x[0-9a-fA-F]+ \(LWP (?P<lwp>\d+)\)(?: "(?P<name>[^"]{0,80})")?\)')
_GDB_FRAME = re.compile(
    r"^#(?P<n>\d+)\s+(?:0x[0-9a-fA-F]+ in )?(?P<function>\?\?|[\w:~<>$.@]{1,300})[^()]{0,200}\("
    r".{0,2000}?(?:\)\s*(?:from (?P<lib>\S{1,300})|at (?P<file>[^:\s]{1,300}):(?P<line>\d+))?)\s*$"
)
_LONGEST = 4096
_PROCESS = re.compile(r"^Process \d+: (?P<title>.*)$")


def from_faulthandler(text: str, who: str, artefact: str, *, sample: str = "", first_line: int = 1) -> Stack:
    """Python's own dump of all threads, innermost frame first. The one thread without a name that is last is the main
    one: faulthandler lists threads from the newest to the oldest."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    head: tuple[str, int, bool, Cite] | None = None

    def close() -> None:
        if head is not None:
            threads.append(Thread(head[0], head[1], head[2], False, tuple(frames), head[3]))
        frames.clear()

    for number, whole in enumerate(text.splitlines(), first_line):
        line = whole[:_LONGEST]
        thread, frame = _FAULT_THREAD.match(line), _FAULT_FRAME.match(line)
        cite = Cite(artefact, number)
        if thread:
            close()
            head = (thread["name"] or "", int(thread["tid"], 16), thread["now"] == "Current thread", cite)
        elif frame and head is not None:
            frames.append(Frame(frame["function"], frame["file"], int(frame["line"][:9]), cite))
    close()
    return Stack(who, "", 0, tuple(threads[::-1]), sample)


def from_gdb(text: str, who: str, artefact: str, *, sample: str = "") -> Stack:
    """``thread apply all bt``. A frame's file is its library where no source is known."""
    threads: list[tuple[int, Thread]] = []
    frames: list[Frame] = []
    head: tuple[int, str, int, Cite] | None = None

    def close() -> None:
        if head is not None:
            threads.append((head[0], Thread(head[1], head[2], True, False, tuple(frames), head[3])))
        frames.clear()

    for number, whole in enumerate(text.splitlines(), 1):
        line = whole[:_LONGEST]
        thread, frame = _GDB_THREAD.match(line), _GDB_FRAME.match(line)
        cite = Cite(artefact, number)
        if thread:
            close()
            head = (int(thread["n"][:9]), thread["name"] or "", int(thread["lwp"][:18]), cite)
        elif frame:
            head = head or (1, "", 0, cite)
            place = frame["file"] or frame["lib"] or ""
            frames.append(Frame(frame["function"], place, int((frame["line"] or "0")[:9]), cite))
    close()
    ordered = tuple(thread for _, thread in sorted(threads, key=lambda item: item[0]))  # gdb's thread 1 is the main one
    return Stack(who, "", ordered[0].tid if ordered else 0, ordered, sample)


def embedded(text: str, dialect: Dialect, artefact: str) -> list[Stack]:
    """The py-spy dumps that a watchdog printed into a log, of ranks by their titles. Of several of one rank the first
    counts: it is the nearest to the stall."""
    found: dict[str, Stack] = {}
    lines = [opened.body for line in text.splitlines() for opened in unwrap(line)[:1]]
    starts = [number for number, line in enumerate(lines) if _PROCESS.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        title = _PROCESS.match(lines[start])
        rank = dialect.rank_of(title["title"]) if title else None
        stack = stacks.from_text("\n".join(lines[start:end]), str(rank), artefact, first_line=start + 1)
        if rank is not None and stack.threads:
            found.setdefault(stack.who, stack)
    return list(found.values())


def looks_like_gdb(text: str) -> bool:
    return re.search(r"^(?:Thread \d+ \(Thread 0x|#0 )", text[:65536], re.MULTILINE) is not None


def looks_like_faulthandler(text: str) -> bool:
    return re.search(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.{0,90}\(most recent call first\):", text[:65536], re.MULTILINE) is not None
