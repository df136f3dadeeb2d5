"""Read a case folder (a bundle is one) into a scene, and judge it. ``case.yaml`` is never opened.

Files are known by name; a file that is not known, or cannot be read as what its name says, is listed as missing with
the reason and is not fatal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors import engines
from monitors.engines import Dialect
from monitors.judge.classify import classify
from monitors.judge.scene import Cite, Clock, Gpu, Health, Log, Missing, Process, Scene, Stack
from monitors.judge.verdict import Verdict
from monitors.observe import batchlog, gpu, metrics, process, stacks

_STACK = re.compile(r"^pyspy-(?P<who>[A-Za-z0-9_]+?)(?:\.(?P<sample>[A-Za-z0-9]+))?\.(?P<form>txt|json)$")
_HEALTH = re.compile(r"GET (?P<route>\S+) (?P<status>\d{3}|connection refused|no answer|timed? ?out)(?: (?P<seconds>[\d.]+))?")
_MOST_BYTES = 256 << 20
_OF_OURS = frozenset(
    {"manifest.json", "verdict.json", "redactions.json", "fleet.toml", "suspicion.json", "launcher.json", "server_info.json"}
)


class CaseError(ValueError):
    """The folder cannot be judged at all; the text names it and says why."""


@dataclass
class _Found:
    boxes: dict[int, blackbox.Snapshot] = field(default_factory=dict)
    cites: dict[int, Cite] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    clocks: dict[int, Clock] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)


def judge(folder: Path) -> Verdict:
    """The verdict on a case folder. Raises CaseError when it is no folder or holds no file."""
    return classify(read(folder))


def read(folder: Path) -> Scene:
    """The scene that a folder holds. Raises CaseError."""
    if not folder.is_dir():
        raise CaseError(f"{folder}: no such folder")
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "case.yaml")
    if not files:
        raise CaseError(f"{folder}: holds no file to judge")
    dialect = detect(files)
    found = _Found()
    for path in files:
        if path.name.startswith(".") or path.name in _OF_OURS:
            continue
        reader = _reader(path.name)
        if reader is None:
            found.missing.append(Missing(path.name, "this file's name is not known; it was not read"))
            continue
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes are more than {_MOST_BYTES}")
            reader(path, dialect, found)
        except (ValueError, KeyError, TypeError, OSError) as error:
            found.missing.append(Missing(path.name, f"could not be read: {error}"))
    found.missing.extend(_gaps(found))
    found.missing.extend(_manifest_gaps(folder))
    return Scene(
        dialect=dialect,
        boxes=found.boxes,
        box_cites=found.cites,
        clocks=found.clocks,
        stacks=tuple(found.stacks),
        gpus=tuple(found.gpus),
        processes=tuple(found.processes),
        logs=tuple(found.logs),
        health=tuple(found.health),
        metrics=found.metrics,
        missing=tuple(found.missing),
        stalled_s=found.progress.get("stalled_s"),
        ended=bool(found.progress.get("ended")),
        ends=int(found.progress.get("ends", 0)),
    )


def detect(files: list[Path]) -> Dialect:
    """The dialect whose words occur most in the folder; the bundled engine's where there is a black box."""
    if any(path.suffix == ".box" for path in files):
        return engines.load("lastbatch")
    scores = dict.fromkeys(engines.names(), 0)
    for path in files:
        if path.suffix in (".box", ".zst", ".html"):
            continue
        with path.open("rb") as file:
            text = file.read(256 << 10).decode(errors="replace")
        for name in scores:
            dialect = engines.load(name)
            scores[name] += 3 * len(re.findall(rf"\b{name}\b", text.lower())) + len(re.findall(rf"\b{name}[:/]", text))
            lines = [line[:2048] for line in text.splitlines()[:400]]
            scores[name] += sum(
                1 for line in lines if dialect.log.line.search(line) or any(n.pattern.search(line) for n in dialect.notices)
            )
    # The bundled engine's log has SGLang's form: only its own name tells them apart, and a tie goes to SGLang.
    best = max(scores, key=lambda name: (scores[name], name == "sglang"))
    return engines.load(best if scores[best] else "sglang")


_Reader = Callable[[Path, Dialect, _Found], None]


def _reader(name: str) -> _Reader | None:
    if name.endswith(".box"):
        return _box
    if _STACK.match(name):
        return _stack
    return next((reader for pattern, reader in _READERS if re.match(pattern, name)), None)


def _box(path: Path, _dialect: Dialect, found: _Found) -> None:
    snapshot = blackbox.decode(path.read_bytes(), path.name)
    found.boxes[snapshot.header.rank] = snapshot
    found.cites[snapshot.header.rank] = Cite(path.name)


def _stack(path: Path, _dialect: Dialect, found: _Found) -> None:
    name = _STACK.match(path.name)
    assert name is not None
    text = path.read_text(errors="replace")
    sample = "" if name["sample"] in (None, "t0") else name["sample"]
    make = stacks.from_json if name["form"] == "json" else stacks.from_text
    stack = make(text, name["who"], path.name, sample=sample)
    if not stack.threads:
        raise ValueError("no thread in it")
    found.stacks.append(stack)


def _log(path: Path, dialect: Dialect, found: _Found) -> None:
    found.logs.append(batchlog.read_text(path.read_bytes(), dialect, path.name))


def _journal(path: Path, dialect: Dialect, found: _Found) -> None:
    found.logs.append(batchlog.read_journal(path.read_bytes(), dialect, path.name))


def _gpu_csv(path: Path, _dialect: Dialect, found: _Found) -> None:
    found.gpus.extend(gpu.from_csv(path.read_text(errors="replace"), path.name))


def _gpu_table(path: Path, _dialect: Dialect, found: _Found) -> None:
    text = path.read_text(errors="replace")
    found.gpus.extend(gpu.from_table(text, path.name) or gpu.from_csv(text, path.name))


def _processes(path: Path, dialect: Dialect, found: _Found) -> None:
    found.processes.extend(process.from_text(path.read_text(errors="replace"), dialect, path.name))


def _metrics(path: Path, _dialect: Dialect, found: _Found) -> None:
    found.metrics.update(metrics.parse(path.read_text(errors="replace")))


def _health(path: Path, _dialect: Dialect, found: _Found) -> None:
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = _HEALTH.search(line)
        if match:
            status = int(match["status"]) if match["status"].isdigit() else 0
            found.health.append(Health(match["route"], status, float(match["seconds"] or 0), Cite(path.name, number)))


def _clocks(path: Path, _dialect: Dialect, found: _Found) -> None:
    for item in json.loads(path.read_text()).values():
        for rank in item.get("ranks", ()):
            found.clocks[int(rank)] = Clock(int(item["mono_ns"]), int(item.get("unix_ns", 0)))


def _progress(path: Path, _dialect: Dialect, found: _Found) -> None:
    found.progress = dict(json.loads(path.read_text()))


_READERS: tuple[tuple[str, _Reader], ...] = (
    (r"server(?:\.[\w-]+)?\.log$", _log),
    (r"events\.txt$", _log),
    (r"journal(?:\.[\w-]+)?\.jsonl$", _journal),
    (r"gpu\.csv$", _gpu_csv),
    (r"nvidia-smi\.txt$", _gpu_table),
    (r"(?:ps|top)\.txt$", _processes),
    (r"metrics(?:\.[\w-]+)?\.txt$", _metrics),
    (r"health\.txt$", _health),
    (r"clocks\.json$", _clocks),
    (r"progress\.json$", _progress),
)


def _gaps(found: _Found) -> list[Missing]:
    """The sources that this folder has nothing of."""
    wanted = {
        "stacks": (found.stacks, "no pyspy-<rank> file that could be read"),
        "GPU readings": (found.gpus, "no gpu.csv or nvidia-smi.txt that could be read"),
        "process table": (found.processes, "no ps.txt that could be read"),
        "log": (found.logs, "no server.log or journal.jsonl that could be read"),
        "black boxes": (found.boxes, "no rank-<n>.box (only the bundled engine writes them)"),
    }
    gaps = [Missing(what, why) for what, (have, why) in wanted.items() if not have]
    samples = {stack.sample for stack in found.stacks} - {"", "native"}
    if found.stacks and not samples:
        gaps.append(Missing("a second stack sample", "only one was taken, so nothing says whether the frames move"))
    return gaps


def _manifest_gaps(folder: Path) -> list[Missing]:
    """What the capture could not take, in its own words."""
    try:
        items = json.loads((folder / "manifest.json").read_text())["items"]
        return [Missing(_item_name(item), item["reason"]) for item in items if item["outcome"] != "taken"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _item_name(item: dict[str, Any]) -> str:
    rank = "" if item["rank"] is None else f" of rank {item['rank']}"
    node = f" on node {item['node']}" if item["node"] else ""
    return f"{item['probe']}{rank}{node}"
