"""The process table: of a node, and as it is written in a bundle or was pasted into a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from monitors.engines import Dialect
from monitors.judge.scene import Cite, Process
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

_COLUMNS = ("NODE", "RANK", "PID", "PPID", "STAT", "%CPU", "THREADS", "WCHAN", "COMMAND")


def sample(remote: Remote, dialect: Dialect, pids: Sequence[int], *, deadline_s: float) -> Reading[tuple[Process, ...]]:
    """The given processes of a node and all that bear the engine's titles."""
    try:
        answer = remote.collect("processes", deadline_s, pids=list(pids), member=dialect.member_title.pattern)
    except NodeError as error:
        return gap(str(error))
    rows: list[Process] = []
    for raw in answer.values():
        title = raw.get("title", "")
        # The most telling wait is that of a thread in an uninterruptible sleep, whichever thread it is.
        waits = [task["wchan"] for task in raw.get("tasks", ()) if task["state"] == "D"] + [raw.get("wchan", "")]
        state = "D" if raw["state"] in "SR" and any(task["state"] == "D" for task in raw.get("tasks", ())) else raw["state"]
        rows.append(
            Process(raw["pid"], raw.get("ppid", 0), state, title, raw.get("cpu_percent"), remote.name, dialect.rank_of(title), waits[0])
        )
    return Reading(tuple(rows))


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
    """A table with a header of ``ps``; the command is the last column and may hold blanks. Rows that do not fit are
    passed over."""
    lines = text.splitlines()
    header = lines[0].split() if lines else []
    if "PID" not in header:
        return ()
    found: list[Process] = []
    for number, line in enumerate(lines[1:], 2):
        cells = dict(zip(header, line.split(None, len(header) - 1), strict=False))
        if not cells.get("PID", "").isdigit():
            continue
        title = cells.get("COMMAND", cells.get("CMD", ""))
        state = cells.get("STAT", cells.get("S", ""))
        rank = int(cells["RANK"]) if cells.get("RANK", "").isdigit() else dialect.rank_of(title)
        cpu = cells.get("%CPU", "")
        found.append(Process(
            int(cells["PID"]), int(cells["PPID"]) if cells.get("PPID", "").isdigit() else 0, state if state == "gone" else state[:1], title,
            float(cpu) if re.fullmatch(r"\d+(?:\.\d+)?", cpu) else None, "" if cells.get("NODE", "-") == "-" else cells["NODE"], rank,
            "" if cells.get("WCHAN", "-") == "-" else cells["WCHAN"], Cite(artefact, number),
        ))  # fmt: skip
    return tuple(found)
