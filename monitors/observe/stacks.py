"""Stacks as py-spy prints them: its JSON, and the text of a dump that somebody pasted into a report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from monitors.judge.scene import Cite, Frame, Stack, Thread
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

_PROCESS = re.compile(r"^Process (?P<pid>\d+): (?P<title>.*)$")
_THREAD = re.compile(r'^\s*Thread (?P<tid>0x[0-9a-fA-F]+|\d+) ?\((?P<state>[^)]*)\)(?:: "(?P<name>.*)")?\s*$')
_FRAME = re.compile(r"^\s+(?P<function>.+?) \((?P<file>[^()]*?(?:\([^()]*\)[^()]*?)*)(?::(?P<line>\d+))?\)\s*$")

_LONGEST_LINE = 2048


def from_json(text: str, who: str, artefact: str, *, sample: str = "", title: str = "") -> Stack:
    """A dump by ``py-spy dump --json``. Raises ValueError when it is none."""
    raw = json.loads(text)
    if not isinstance(raw, list):
        raise ValueError(f"{artefact}: not a list of threads")
    threads = tuple(_thread(item, artefact) for item in raw)
    info: Any = next((item["process_info"] for item in raw if item.get("process_info")), None) or {}
    pid = int(raw[0].get("pid", 0)) if raw else 0
    return Stack(who, title or str(info.get("command_line") or ""), pid, threads, sample)


def _thread(raw: Any, artefact: str) -> Thread:
    cite = Cite(artefact)
    frames = tuple(
        Frame(
            str(f.get("name", "")),
            str(f.get("short_filename") or f.get("filename") or f.get("module") or ""),
            int(f.get("line") or 0),
            cite,
        )
        for f in raw.get("frames") or ()
    )
    return Thread(str(raw.get("thread_name") or ""), int(raw.get("os_thread_id") or raw.get("thread_id") or 0), bool(raw.get("active")),
                  bool(raw.get("owns_gil")), frames, Cite(artefact))  # fmt: skip


def from_text(text: str, who: str, artefact: str, *, sample: str = "", first_line: int = 1) -> Stack:
    """A dump as text; lines that are neither thread nor frame are passed over."""
    title, pid = "", 0
    threads: list[Thread] = []
    frames: list[Frame] = []
    head: tuple[str, int, str, Cite] | None = None

    def close() -> None:
        if head is not None:
            name, tid, state, cite = head
            threads.append(Thread(name, tid, "active" in state, "gil" in state, tuple(frames), cite))
        frames.clear()

    for number, whole in enumerate(text.splitlines(), first_line):
        line = whole[:_LONGEST_LINE]
        process, thread, frame = _PROCESS.match(line), _THREAD.match(line), _FRAME.match(line)
        if process and not title:
            title, pid = process["title"], int(process["pid"])
        elif thread:
            close()
            head = (thread["name"] or "", int(thread["tid"], 0), thread["state"], Cite(artefact, number))
        elif frame and head is not None:
            frames.append(Frame(frame["function"], frame["file"], int(frame["line"] or 0), Cite(artefact, number)))
    close()
    return Stack(who, title, pid, tuple(threads), sample)


def dump(remote: Remote, pids: Sequence[int], *, native: bool = False, deadline_s: float) -> Reading[dict[int, Any]]:
    """py-spy of many processes of a node in parallel: ``{pid: {threads | reason, state_before, state_after,
    continued}}``. A target that py-spy left stopped has been continued."""
    if not pids:
        return gap("no process is known to dump")
    try:
        answer = remote.collect("stacks", deadline_s, pids=list(pids), py_spy=remote.py_spy, native=native)
    except NodeError as error:
        return gap(str(error))
    return Reading({int(pid): item for pid, item in answer.items()})
