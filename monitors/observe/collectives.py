"""What each rank says of its collectives: NCCL flight recorders, NCCL RAS, and summaries of them. Read only.

What these cannot say: a recorder is dumped asynchronously and overwritten, so a dump may be cut or of another moment
than its neighbour's; its ring holds the last 2,000 entries or so; the rank that matters may be missing. RAS may call
a communicator healthy in the middle of a time-out and may name the wrong side; a rank that does not answer it is
evidence by its silence. Some versions print malformed JSON, which is read by its numbers.
"""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from monitors.judge.scene import Cite, Enqueued

_LAUNCHED = re.compile(r"(?P<n>\d+) ranks? (?:has|have) launched up to operation (?P<seq>\d+)")
_RAS_RANK = re.compile(r"^\s+Rank (?P<rank>\d+)\b(?:.{0,120}?(?:operation|count)s? (?P<seq>\d+))?")
_RAS_MISSING = re.compile(r"(?i)missing communicator data from|did not respond|unresponsive|dead process|lost process")
_LOOSE = re.compile(r'"rank"\s*:\s*(?P<rank>\d{1,9})')
_COUNT = re.compile(r'"(?P<key>[\w ]*(?:[Cc]ount|[Oo]ps?)[\w ]*|All\w+|Reduce\w*|Broadcast)"\s*:\s*(?P<n>\d+)')
_ADVANCED = 64  # levels of nesting that a dump may have


class _Plain(pickle.Unpickler):
    """A recorder's dump is a pickle of plain values: whatever else is in it is refused, never run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"the dump holds an object of {module}.{name}; only plain values are read")


def recorder(data: bytes, artefact: str, rank: int | None = None) -> tuple[Enqueued, ...]:
    """One rank's flight recorder, as JSON or as PyTorch's pickle. Raises ValueError when it is neither, or is cut."""
    try:
        raw = json.loads(data) if data.lstrip()[:1] in (b"{", b"[") else _Plain(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError, MemoryError, UnicodeDecodeError,
            OverflowError, RecursionError) as error:  # fmt: skip
        raise ValueError(f"cut or no flight recorder dump ({error or type(error).__name__}); it is written asynchronously: "
                         "copy it only after 'Finished writing'") from error  # fmt: skip
    entries = raw.get("entries") if isinstance(raw, dict) else raw
    if not isinstance(entries, list):
        raise ValueError("no entries in it")
    if rank is None:
        rank = next((int(raw[key]) for key in ("rank", "global_rank") if isinstance(raw, dict) and str(raw.get(key, "")).isdigit()), None)
    if rank is None:
        raise ValueError("neither the dump nor its name says of which rank it is")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if isinstance(entry, dict) and not entry.get("is_p2p"):
            group = entry.get("process_group", entry.get("pg_id", ""))
            groups.setdefault(str(group[0] if isinstance(group, list | tuple) and group else group), []).append(entry)
    return tuple(_standing(rank, group, found, Cite(artefact)) for group, found in groups.items())


def _standing(rank: int, group: str, entries: list[Mapping[str, Any]], cite: Cite) -> Enqueued:
    """The first collective that has not completed, else the last."""
    ordered = sorted(entries, key=_seq)
    done = [entry for entry in ordered if entry.get("state") == "completed"]
    open_ = next((entry for entry in ordered if entry.get("state") != "completed"), ordered[-1])
    return Enqueued(rank, _seq(open_), _op(open_.get("profiling_name")), str(open_.get("input_sizes") or open_.get("numel") or ""),
                    str(open_.get("state") or ""), max((_seq(e) for e in done), default=None), group, "recorder", cite)  # fmt: skip


def _seq(entry: Mapping[str, Any]) -> int:
    return next((int(entry[key]) for key in ("collective_seq_id", "seq_id", "op_id", "record_id") if isinstance(entry.get(key), int)), -1)


def _op(name: object) -> str:
    return str(name or "").removeprefix("nccl:").removeprefix("_").split(" ", 1)[0].lower()


_COLUMNS = {
    "rank": ("rank", "global_rank"),
    "seq": ("seq", "seq_id", "collective_seq_id", "last_enqueued", "enqueued", "last_seq", "collective"),
    "completed": ("completed", "last_completed"),
    "op": ("op", "op_type", "optype", "kind", "profiling_name", "last_op", "collective_name", "name"),
    "state": ("state", "status", "last_state"),
    "size": ("numel", "numel_in", "size", "sizes", "input_sizes", "bytes", "nbytes"),
    "group": ("group", "pg", "pg_id", "process_group", "comm"),
}


def summary(text: str, artefact: str) -> tuple[Enqueued, ...]:
    """A table of recorders, one row a rank (and a group). Raises ValueError when its header names no rank or number."""
    rows = list(csv.reader(text.splitlines()))
    header = [re.sub(r"[^a-z0-9]+", "_", cell.strip().lower()).strip("_") for cell in rows[0]] if rows else []
    at = {key: next((header.index(name) for name in names if name in header), None) for key, names in _COLUMNS.items()}
    if at["rank"] is None or (at["seq"] is None and at["completed"] is None):
        raise ValueError("no column of ranks and sequence numbers")

    found: list[Enqueued] = []
    for number, row in enumerate(rows[1:], 2):

        def cell(key: str, row: list[str] = row) -> str:
            index = at[key]
            return row[index].strip() if index is not None and index < len(row) else ""

        rank, seq, completed = _whole(cell("rank")), _whole(cell("seq")), _whole(cell("completed"))
        if rank is None or (seq is None and completed is None):
            continue
        known = seq if seq is not None else (completed or 0) + 1
        found.append(Enqueued(rank, known, _op(cell("op")), cell("size"), cell("state").lower(), completed, cell("group"), "recorder",
                              Cite(artefact, number)))  # fmt: skip
    return tuple(found)


def ras(text: str, artefact: str) -> tuple[tuple[Enqueued, ...], str]:
    """What RAS printed, as text or JSON, and a note on what it leaves open (empty when nothing)."""
    if text.lstrip().startswith("{"):
        try:
            found = tuple(_ras_json(json.loads(text), artefact))
            note = ""
        except (ValueError, RecursionError):
            found = tuple(_ras_loose(text, artefact))
            note = "malformed JSON, read by its numbers only"
        return found, note or ("" if found else "no operation counts in it; RAS may call a communicator healthy in a time-out")
    found = tuple(_ras_text(text, artefact))
    silent = next((line.strip() for line in text.splitlines() if _RAS_MISSING.search(line)), "")
    if silent:
        return found, f"{silent[:160]}: a rank that RAS does not hear is evidence by its silence"
    return found, "" if found else "it reports no mismatch, which proves nothing: RAS may call a communicator healthy in a time-out"


def _ras_text(text: str, artefact: str) -> Iterable[Enqueued]:
    """Blocks of "N ranks have launched up to operation X" followed by the ranks of the smaller blocks."""
    blocks: list[tuple[int, int, int]] = []  # how many ranks, operation, line
    named: list[tuple[int, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        launched, rank = _LAUNCHED.search(line), _RAS_RANK.match(line)
        if launched:
            if named:
                break
            blocks.append((int(launched["n"]), int(launched["seq"]), number))
        elif rank and blocks:
            named.append((int(rank["rank"]), number))
    if len(blocks) < 2:
        return
    most = max(blocks)
    few = min(blocks)
    laggards = {slow for slow, _ in named}
    for slow, number in named[: few[0]] or [(-1, few[2])]:
        yield Enqueued(slow, few[1], group="ras", source="ras", cite=Cite(artefact, number))
    for other in [n for n in range(most[0] + few[0]) if n not in laggards][: most[0]]:
        yield Enqueued(other, most[1], group="ras", source="ras", cite=Cite(artefact, most[2]))


def _ras_json(raw: Any, artefact: str, depth: int = 0, group: str = "") -> Iterable[Enqueued]:
    if depth > _ADVANCED:
        return
    if isinstance(raw, dict):
        group = str(raw.get("hash") or raw.get("comm_hash") or raw.get("comm") or group)
        counts = _counts(raw)
        if isinstance(raw.get("rank"), int) and counts is not None:
            yield Enqueued(raw["rank"], counts, group=group, source="ras", cite=Cite(artefact))
            return
        for value in raw.values():
            yield from _ras_json(value, artefact, depth + 1, group)
    elif isinstance(raw, list):
        for value in raw:
            yield from _ras_json(value, artefact, depth + 1, group)


def _counts(raw: Mapping[str, Any]) -> int | None:
    """All collectives of a rank, summed over kinds."""
    total: int | None = None
    for key, value in raw.items():
        if "count" in key.lower() or "op" in key.lower():
            numbers = value.values() if isinstance(value, dict) else [value]
            for number in numbers:
                if isinstance(number, int) and not isinstance(number, bool):
                    total = (total or 0) + number
    return total


def _ras_loose(text: str, artefact: str) -> Iterable[Enqueued]:
    text = text[: 1 << 20]
    starts = list(_LOOSE.finditer(text))
    for match, after in zip(starts, [*(m.start() for m in starts[1:]), len(text)], strict=True):
        counts = [int(found["n"][:18]) for found in _COUNT.finditer(text, match.end(), min(after, match.end() + 2000))]
        if counts:
            cite = Cite(artefact, text.count("\n", 0, match.start()) + 1)
            yield Enqueued(int(match["rank"]), sum(counts), group="ras", source="ras", cite=cite)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None
