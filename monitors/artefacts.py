"""The artefacts of a case folder: which reader takes which file, and what it adds to what was found.

A file is known by its name. A reader raises ValueError (or what a broken file makes it raise) and the folder's reader
lists the file as missing with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors.engines import Dialect
from monitors.judge.scene import Answer, Cite, Client, Clock, Enqueued, Gpu, Health, Log, Missing, Process, Stack, Unit
from monitors.observe import answers, batchlog, clients, collectives, dumps, gpu, metrics, process, stacks, units

_STACK = re.compile(r"^(?P<tool>pyspy|gdb|faulthandler|stack)-(?P<who>[A-Za-z0-9_]+?)(?:\.(?P<sample>[A-Za-z0-9]+))?\.(?P<form>txt|json)$")
_RECORDER = re.compile(r"^(?:fr|flight|nccl_trace_rank|recorder)[-_]?(?P<rank>\d+)?(?:\.(?:json|pickle|pkl|bin))?$")
_SAMPLE = re.compile(r"\.t?(?P<sample>\d+)\.txt$")
_HEALTH = re.compile(
    r"(?:(?P<method>GET|POST|HEAD) )?(?:https?://[^/\s]{1,80})?(?P<route>/[\w./-]{1,80})\s{0,4}(?:->|:|=)?\s{0,4}"
    r"(?P<status>\d{3}\b|(?i:connection refused|no answer|timed? ?out|hangs?))(?:\D{0,6}(?P<seconds>\d{1,6}(?:\.\d{1,9})?))?"
)


@dataclass
class Found:
    boxes: dict[int, blackbox.Snapshot] = field(default_factory=dict)
    cites: dict[int, Cite] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    printed: list[Stack] = field(default_factory=list)  # dumps that a watchdog wrote into a log
    gpus: list[Gpu] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    pages: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # metrics, by sample
    enqueued: list[Enqueued] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    clocks: dict[int, Clock] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)


Reader = Callable[[Path, Dialect, Found], None]


def reader_of(path: Path) -> Reader | None:
    name = path.name
    if name.endswith(".box"):
        return _box
    if _STACK.match(name):
        return _stack
    if _RECORDER.match(name):
        return _recorder
    return next((reader for pattern, reader in _READERS if re.match(pattern, name)), None)


def _box(path: Path, _dialect: Dialect, found: Found) -> None:
    snapshot = blackbox.decode(path.read_bytes(), path.name)
    found.boxes[snapshot.header.rank] = snapshot
    found.cites[snapshot.header.rank] = Cite(path.name)


def _stack(path: Path, _dialect: Dialect, found: Found) -> None:
    name = _STACK.match(path.name)
    assert name is not None
    text = path.read_text(errors="replace")
    sample = "" if name["sample"] in (None, "t0", "0") else name["sample"]
    if name["form"] == "json":
        stack = stacks.from_json(text, name["who"], path.name, sample=sample)
    elif dumps.looks_like_faulthandler(text):
        stack = dumps.from_faulthandler(text, name["who"], path.name, sample=sample)
    elif dumps.looks_like_gdb(text):
        stack = dumps.from_gdb(text, name["who"], path.name, sample=sample or "native")
    else:
        stack = stacks.from_text(text, name["who"], path.name, sample=sample)
    if not stack.threads:
        raise ValueError("no thread in it")
    found.stacks.append(stack)


def promote(found: Found) -> None:
    """Where a process has no first sample, its native one (gdb) stands in for it; what a watchdog printed into a log
    stands in where there is no file."""
    known = {stack.who for stack in found.stacks}
    found.stacks.extend(stack for stack in found.printed if stack.who not in known)
    first = {stack.who for stack in found.stacks if not stack.sample}
    for i, stack in enumerate(found.stacks):
        if stack.who not in first:
            first.add(stack.who)
            found.stacks[i] = Stack(stack.who, stack.title, stack.pid, stack.threads)


def _log(path: Path, dialect: Dialect, found: Found) -> None:
    data = path.read_bytes()
    found.logs.append(batchlog.read_text(data, dialect, path.name))
    if b"Process " in data:
        found.printed.extend(dumps.embedded(data.decode(errors="replace"), dialect, path.name))


def _recorder(path: Path, _dialect: Dialect, found: Found) -> None:
    name = _RECORDER.match(path.name)
    rank = int(name["rank"]) if name and name["rank"] else None
    found.enqueued.extend(collectives.recorder(path.read_bytes(), path.name, rank))


def _summary(path: Path, _dialect: Dialect, found: Found) -> None:
    found.enqueued.extend(collectives.summary(path.read_text(errors="replace"), path.name))


def _ras(path: Path, _dialect: Dialect, found: Found) -> None:
    said, note = collectives.ras(path.read_text(errors="replace"), path.name)
    found.enqueued.extend(said)
    if note:
        found.missing.append(Missing(path.name, note))


def _stream(path: Path, _dialect: Dialect, found: Found) -> None:
    found.answers.append(answers.from_sse(path.read_text(errors="replace"), path.name))


def _response(path: Path, _dialect: Dialect, found: Found) -> None:
    text = path.read_text(errors="replace")
    make = answers.from_sse if text.lstrip().startswith(("data:", "event:", ":")) else answers.from_json
    found.answers.append(make(text, path.name))


def _clients(path: Path, _dialect: Dialect, found: Found) -> None:
    found.clients.extend(clients.from_text(path.read_text(errors="replace"), path.name))


def _unit(path: Path, _dialect: Dialect, found: Found) -> None:
    found.units.append(units.from_show(path.read_text(errors="replace"), path.name))


def _attempts(path: Path, _dialect: Dialect, found: Found) -> None:
    found.units.append(units.from_attempts(path.read_text(errors="replace"), path.name))


def _status(path: Path, dialect: Dialect, found: Found) -> None:
    found.processes.append(process.from_status(path.read_text(errors="replace"), dialect, path.name))


def _journal(path: Path, dialect: Dialect, found: Found) -> None:
    found.logs.append(batchlog.read_journal(path.read_bytes(), dialect, path.name))


def _gpu_csv(path: Path, _dialect: Dialect, found: Found) -> None:
    found.gpus.extend(gpu.from_csv(path.read_text(errors="replace"), path.name))


def _gpu_table(path: Path, _dialect: Dialect, found: Found) -> None:
    text = path.read_text(errors="replace")
    found.gpus.extend(gpu.from_table(text, path.name) or gpu.from_csv(text, path.name))


def _processes(path: Path, dialect: Dialect, found: Found) -> None:
    found.processes.extend(process.from_text(path.read_text(errors="replace"), dialect, path.name))


def _metrics(path: Path, dialect: Dialect, found: Found) -> None:
    sample = _SAMPLE.search(path.name)
    found.pages.append((int(sample["sample"]) if sample else 0, metrics.parse(path.read_text(errors="replace"), metrics.names_of(dialect))))


def _health(path: Path, _dialect: Dialect, found: Found) -> None:
    """Answers of routes, one a line. A POST is a client's request, whatever file it stands in."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = _HEALTH.search(line[:2048])
        if match is None:
            continue
        cite, status = Cite(path.name, number), int(match["status"]) if match["status"].isdigit() else 0
        if match["method"] == "POST":
            found.clients.append(Client("ok" if status == 200 else "timeout", line.strip()[:300], cite))
        else:
            found.health.append(Health(match["route"], status, float(match["seconds"] or 0), cite))


def _clocks(path: Path, _dialect: Dialect, found: Found) -> None:
    for item in json.loads(path.read_text()).values():
        for rank in item.get("ranks", ()):
            found.clocks[int(rank)] = Clock(int(item["mono_ns"]), int(item.get("unix_ns", 0)))


def _progress(path: Path, _dialect: Dialect, found: Found) -> None:
    found.progress = dict(json.loads(path.read_text()))


_READERS: tuple[tuple[str, Reader], ...] = (
    (r"proxy(?:\.[\w-]+)?\.(?:log|txt)$", _clients),
    (r"(?:smoke|client|clients|canary)(?:\.[\w-]+)?\.(?:txt|csv|log)$", _clients),
    (r"(?:events|dmesg|kernel|kubectl-[\w-]+|pod[\w-]*|describe[\w-]*)\.(?:txt|log)$", _log),
    (r"journal(?:\.[\w-]+)?\.(?:jsonl|json)$", _journal),
    (r"gpu(?:[.-][\w-]+)?\.csv$", _gpu_csv),
    (r"(?:nvidia|rocm|npu)-smi(?:\.[\w-]+)?\.txt$", _gpu_table),
    (r"(?:ps|top)(?:\.[\w-]+)?\.txt$", _processes),
    (r"proc-status(?:[.-][\w-]+)?\.txt$", _status),
    (r"metrics(?:\.[\w-]+)?\.txt$", _metrics),
    (r"health(?:\.[\w-]+)?\.txt$", _health),
    (r"stream(?:[.-][\w-]+)?\.(?:sse|txt)$", _stream),
    (r"response(?:[.-][\w-]+)?\.(?:json|txt)$", _response),
    (r"systemctl-show(?:[.-][\w@-]+)?\.txt$", _unit),
    (r"attempts\.csv$", _attempts),
    (r"(?:nccl)?ras(?:\.[\w-]+)?\.(?:txt|json)$", _ras),
    (r"(?:fr|flight|recorder)[-_]?summary\.csv$", _summary),
    (r"clocks(?:[.-][\w-]+)?\.json$", _clocks),
    (r"progress\.json$", _progress),
    (r"[\w.-]+\.log$", _log),
)
