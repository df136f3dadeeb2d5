"""The process table: of a node, and as it is written in a bundle or was pasted into a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monitors.engines import Dialect
from monitors.judge.scene import Cite, Process
from monitors.observe import onnode
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

_COLUMNS = ("NODE", "RANK", "PID", "PPID", "STAT", "%CPU", "THREADS", "WCHAN", "COMMAND")


def sample(
    remote: Remote, dialect: Dialect, pids: Sequence[int], *, deadline_s: float, parents: bool = False
) -> Reading[tuple[Process, ...]]:
    """The given processes of a node and all that bear the engine's titles; with ``parents`` also those that started them."""
    try:
        answer = remote.collect("processes", deadline_s, pids=list(pids), member=dialect.member_title.pattern, parents=parents)
    except NodeError as error:
        return gap(str(error))
    return Reading(_rows(answer, dialect, remote.name))


def family(remote: Remote, dialect: Dialect, *, deadline_s: float) -> Reading[tuple[Process, ...]]:
    """A node's processes with the engine's titles, and their parents. This machine's are read in this process, which
    costs no interpreter."""
    if not remote.local:
        return sample(remote, dialect, [], deadline_s=deadline_s, parents=True)
    try:
        return Reading(_rows(onnode.processes(member=dialect.member_title.pattern, parents=True), dialect, remote.name))
    except OSError as error:
        return gap(f"node {remote.name}: /proc: {error.strerror}")


def _rows(answer: Mapping[str, Any], dialect: Dialect, node: str) -> tuple[Process, ...]:
    rows: list[Process] = []
    for raw in answer.values():
        title = raw.get("title", "")
        # The most telling wait is that of a thread in an uninterruptible sleep, whichever thread it is.
        waits = [task["wchan"] for task in raw.get("tasks", ()) if task["state"] == "D"] + [raw.get("wchan", "")]
        state = "D" if raw["state"] in "SR" and any(task["state"] == "D" for task in raw.get("tasks", ())) else raw["state"]
        rows.append(Process(raw["pid"], raw.get("ppid", 0), state, title, raw.get("cpu_percent"), node, dialect.rank_of(title), waits[0]))
    return tuple(rows)


def to_text(rows: Iterable[Process]) -> str:
    lines = ["{:<12} {:>4} {:>8} {:>8} {:<5} {:>6} {:<24} {}".format(*(c for c in _COLUMNS if c != "THREADS"))]
    for r in rows:
        rank = "-" if r.rank is None else str(r.rank)
        cpu = "-" if r.cpu_percent is None else f"{r.cpu_percent:.1f}"
        lines.append(
            f"{r.node or '-':<12} {rank:>4} {r.pid:>8} {r.ppid:>8} {r.state or '-':<5} {cpu:>6} {r.wchan or '-':<24} {r.title or '-'}"
        )
    return "\n".join(lines) + "\n"


def from_text(text: str, dialect: Dialect, artefact: str) -> tuple[Process, ...]:
    """A table with a header of ``ps`` or ``top``, whatever stands before it; the command is the last column and may
    hold blanks. Rows that do not fit are passed over."""
    header: list[str] = []
    found: list[Process] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(None, len(header) - 1 if header else 64)
        if "PID" in words and ("COMMAND" in words or "CMD" in words):
            header = line.split()
            continue
        cells = dict(zip(header, words, strict=False))
        if not cells.get("PID", "").isdigit():
            continue
        title = cells.get("COMMAND", cells.get("CMD", "")).strip()
        # A process that has ended and is not waited for has lost its title: ps gives its short name in brackets.
        title = title[1 : title.rindex("]")] if title.startswith("[") and "]" in title else title
        state = cells.get("STAT", cells.get("S", ""))
        rank = int(cells["RANK"]) if cells.get("RANK", "").isdigit() and len(cells["RANK"]) < 6 else dialect.rank_of(title)
        cpu = cells.get("%CPU", "")
        pid, ppid = (int(cells[key][:18]) if cells.get(key, "").isdigit() else 0 for key in ("PID", "PPID"))
        node, wchan = ("" if cells.get(key, "-") == "-" else cells[key] for key in ("NODE", "WCHAN"))
        busy = float(cpu) if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", cpu) else None
        found.append(Process(pid, ppid, state if state == "gone" else state[:1], title, busy, node, rank, wchan, Cite(artefact, number)))
    return tuple(found)


def from_status(text: str, dialect: Dialect, artefact: str) -> Process:
    """``/proc/PID/status``, with the line ``wchan: ...`` where somebody added it. Raises ValueError without a state."""
    values = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in text.splitlines()) if colon}
    if not values.get("State"):
        raise ValueError("no state in it")
    line = next((n for n, line in enumerate(text.splitlines(), 1) if line.startswith("State:")), 0)
    numbers = [int(values[key][:18]) if values.get(key, "").isdigit() else 0 for key in ("Pid", "PPid")]
    wchan = values.get("wchan", "")
    title = values.get("Name", "")
    return Process(numbers[0], numbers[1], values["State"][:1], title, None, "", dialect.rank_of(title), "" if wchan == "0" else wchan,
                   Cite(artefact, line))  # fmt: skip
