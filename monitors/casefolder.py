"""Read a case folder (a bundle is one) into a scene, and judge it. ``case.yaml`` is never opened.

Files are known by name; a file that is not known, or cannot be read as what its name says, is listed as missing with
the reason and is not fatal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monitors import engines, zones
from monitors.artefacts import Found, promote, reader_of
from monitors.capture.manifest import BundleError, load, verify
from monitors.engines import Dialect
from monitors.judge.classify import classify
from monitors.judge.scene import Missing, Scene
from monitors.judge.verdict import Verdict

_MOST_BYTES = 256 << 20
_OF_OURS = frozenset(
    {
        "manifest.json",
        "verdict.json",
        "redactions.json",
        "fleet.toml",
        "suspicion.json",
        "launcher.json",
        "server_info.json",
        "report.html",
        "report.md",
    }
)


class CaseError(ValueError):
    """The folder cannot be judged at all; the text names it and says why."""


def judge(folder: Path) -> Verdict:
    """The verdict on a case folder. Raises CaseError when it is no folder or holds nothing to judge by."""
    return classify(read(folder))


def read(folder: Path) -> Scene:
    """The scene that a folder holds. Raises CaseError."""
    if not folder.is_dir():
        raise CaseError(f"{folder}: no such folder")
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "case.yaml")
    if not files:
        raise CaseError(f"{folder}: holds no file to judge")
    dialect = _recorded(folder) or detect(files)
    found = Found()
    known = False
    for path in files:
        if path.name.startswith(".") or path.name in _OF_OURS:
            continue
        reader = reader_of(path)
        if reader is None:
            found.missing.append(Missing(path.name, "this file's name is not known; it was not read"))
            continue
        known = True
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes are more than {_MOST_BYTES}")
            reader(path, dialect, found)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
            found.missing.append(Missing(path.name, f"could not be read: {error}"))
    if not known and not (folder / "manifest.json").exists():
        names = ", ".join(path.name for path in files[:6]) + (", ..." if len(files) > 6 else "")
        raise CaseError(
            f"{folder}: no bundle or case here: no file of it has a name that is known ({names}); known are server.log, "
            "journal.jsonl, pyspy-<rank>.txt, gpu.csv, metrics.txt, ps.txt, health.txt, rank-<n>.box and the others that a bundle holds"
        )
    promote(found)
    pages = [page for _, page in sorted(found.pages, key=lambda item: item[0])]
    offsets = zones.of_bundle(folder, dialect)
    found.missing.extend(_gaps(found))
    found.missing.extend(_manifest_gaps(folder))
    found.missing.extend(_changed(folder))
    return Scene(
        dialect=dialect,
        boxes=found.boxes,
        box_cites=found.cites,
        clocks=found.clocks,
        stacks=tuple(found.stacks),
        gpus=tuple(found.gpus),
        processes=tuple(found.processes),
        logs=tuple(zones.known(log, offsets) for log in found.logs),
        health=tuple(found.health),
        metrics=pages[-1] if pages else {},
        metrics_before=pages[0] if len(pages) > 1 else {},
        enqueued=tuple(found.enqueued),
        answers=tuple(found.answers),
        clients=tuple(found.clients),
        units=tuple(found.units),
        missing=tuple(found.missing),
        stalled_s=found.progress.get("stalled_s"),
        ended=bool(found.progress.get("ended")),
        ends=int(found.progress.get("ends", 0)),
        canary=_canary(found.progress.get("canary")),
        slots=str(found.progress.get("slots", ""))[:400],
        markup=str(found.progress.get("markup", ""))[:400],
    )


def _canary(said: object) -> tuple[int, int]:
    """(wrong, of how many) from the digests that a monitor kept."""
    if not isinstance(said, dict) or not isinstance(said.get("under_load"), list):
        return 0, 0
    digests = said["under_load"]
    return sum(digest != said.get("recorded") for digest in digests), len(digests)


def _recorded(folder: Path) -> Dialect | None:
    """The engine that the capture of a bundle was told; a generic one says nothing of how it speaks."""
    try:
        engine = str(load(folder).get("engine"))
    except BundleError:
        return None
    return engines.load(engine) if engine in engines.names() and engine != "generic" else None


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
        lines = [line[:2048] for line in text.splitlines()[:400]]
        for name in scores:
            scores[name] += sum(1 for line in lines if engines.load(name).words.search(line))
    # The bundled engine's log has SGLang's form: only its own name tells them apart, and a tie goes to SGLang.
    best = max(scores, key=lambda name: (scores[name], name == "lastbatch" and scores[name] > 0, name == "sglang"))
    return engines.load(best if scores[best] else "generic")


def _gaps(found: Found) -> list[Missing]:
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


def _changed(folder: Path) -> list[Missing]:
    """What is not as the manifest of a bundle says: somebody or something has changed the evidence."""
    try:
        problems = verify(folder).problems if (folder / "manifest.json").exists() else ()
    except (BundleError, KeyError, TypeError, AttributeError) as error:
        return [Missing("the manifest", f"cannot be checked: {error}")]
    return [Missing("evidence as it was captured", f"{problem}: changed since the capture") for problem in problems]


def _item_name(item: dict[str, Any]) -> str:
    rank = "" if item["rank"] is None else f" of rank {item['rank']}"
    node = f" on node {item['node']}" if item["node"] else ""
    return f"{item['probe']}{rank}{node}"
