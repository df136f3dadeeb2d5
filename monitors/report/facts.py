"""What a report says, read from a bundle: plain values, each with its cite. No word is chosen here that no file backs."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.blackbox import Phase, Snapshot
from monitors import casefolder
from monitors.capture.manifest import load
from monitors.judge.ranks import odd_ones, views
from monitors.judge.scene import Cite, Scene
from monitors.judge.verdict import Verdict
from monitors.report import stacktree, timeline
from monitors.report.timeline import Timeline

_AROUND = 3  # lines shown before and after a cited one
_TAIL = 12  # events of a black box that are shown
_LONGEST = 400


@dataclass(frozen=True)
class Row:
    """One rank. ``shares`` is the share of its time that the main thread spent in each phase."""

    rank: str
    node: str
    pid: int
    process: str
    stands: str
    phase: str
    device: str
    step: int | None
    enqueued: int | None
    completed: int | None
    shares: Mapping[str, float]
    odd: bool
    suspect: bool
    cite: Cite


@dataclass(frozen=True)
class Excerpt:
    """Lines of an artefact, by number, with those that something cites."""

    artefact: str
    lines: tuple[tuple[int, str], ...]
    cited: frozenset[int]
    of: str = ""  # "decoded" for a binary artefact


@dataclass(frozen=True)
class Done:
    """A step of a runbook that was carried out beside this bundle."""

    utc: str
    runbook: str
    name: str
    outcome: str
    seconds: float
    approved_by: str
    restores: bool  # the end of this step is the proof that service was restored
    cite: Cite


@dataclass(frozen=True)
class Facts:
    folder: Path
    manifest: Mapping[str, Any]
    verdict: Verdict
    progress: Mapping[str, Any]
    scene: Scene
    line: Timeline
    rows: tuple[Row, ...]
    trees: list[tuple[str, list[stacktree.Node]]]
    gaps: tuple[tuple[str, str], ...]
    redactions: Mapping[str, int]
    excerpts: tuple[Excerpt, ...]
    settings: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    done: tuple[Done, ...]
    server: Mapping[str, Any]  # what the server said of itself

    @property
    def restored_utc(self) -> str:
        """The end of the first confirmation that passed, after the last that did not."""
        failed = max((one.utc for one in self.done if one.restores and one.outcome != "passed"), default="")
        ends = [_after(one.utc, one.seconds) for one in self.done if one.restores and one.outcome == "passed" and one.utc > failed]
        return min(ends, default="")


def read(folder: Path) -> Facts:
    """Everything that a report of this bundle says. Raises BundleError for a folder without manifest, CaseError for
    one without any file."""
    manifest = {"end": None, "outcome": "complete", "clocks": {}, "tools": {}, "engine": "not recorded", **load(folder)}
    scene = casefolder.read(folder)
    raw = _json(folder / "verdict.json")
    verdict = Verdict.from_json(raw) if raw else casefolder.judge(folder)
    trail = _trail(folder / "monitor/trail.jsonl")
    line = timeline.build(scene, manifest, trail, _json(folder / "suspicion.json"))
    ranks = views(scene)
    suspects = [view.who for view in ranks if any(text.startswith(view.name().split(" (")[0] + " ") for text in verdict.suspects)]
    odd = {view.who for view in odd_ones(ranks)}
    rows = tuple(_row(view, scene, view.who in odd, view.who in suspects) for view in ranks)
    gaps = {gap.what: gap.reason for gap in verdict.missing}
    for item in manifest["items"]:
        if item["outcome"] != "taken":
            rank = "" if item["rank"] is None else f" of rank {item['rank']}"
            node = f" on node {item['node']}" if item["node"] else ""
            gaps.setdefault(f"{item['probe']}{rank}{node}", item["reason"])
    ledger = _json_list(folder / "redactions.json")
    counts: dict[str, int] = {}
    for entry in ledger:
        counts[entry["rule"]] = counts.get(entry["rule"], 0) + 1
    settings: dict[str, Any] = next((json.loads(box.settings_json or "{}") for box in scene.boxes.values()), {})
    box = next(iter(scene.boxes.values()), None)
    fingerprint = {"configuration": box.header.config_digest, "invocation": box.header.invocation_id} if box else {}
    excerpts = _excerpts(folder, scene, verdict, line)
    trees = stacktree.merge(scene.stacks, suspects or sorted(odd))
    return Facts(folder, manifest, verdict, _json(folder / "progress.json"), scene, line, rows, trees,
                 tuple(gaps.items()), counts, excerpts, settings, fingerprint, _done(folder),
                 _json(folder / "server_info.json"))  # fmt: skip


_RUN = ("passed", "failed", "interrupted")  # of a step's outcomes, those of one that was carried out


def _done(folder: Path) -> tuple[Done, ...]:
    """The steps that records of runbooks in this folder say were carried out, as they came."""
    found = []
    for path in sorted(folder.glob("runbook-*.json")):
        record = _json(path)
        for step in record.get("steps", ()):
            if not isinstance(step, dict) or step.get("outcome") not in _RUN or not step.get("began_utc"):
                continue
            approved = str(step.get("approved_by") or "-")
            found.append(
                Done(str(step["began_utc"]), str(record.get("runbook", "")), str(step.get("name", "")), step["outcome"],
                     float(step.get("seconds") or 0.0), "" if approved == "-" else approved,
                     step.get("section") == "Confirm" and str(step.get("name", "")) == "confirm", Cite(path.name))
            )  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.utc))


def _after(utc: str, seconds: float) -> str:
    at = dt.datetime.fromisoformat(utc.replace("Z", "+00:00")) + dt.timedelta(seconds=seconds)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _row(view: Any, scene: Scene, odd: bool, suspect: bool) -> Row:
    box: Snapshot | None = view.box
    process = view.process
    shares: dict[str, float] = {}
    if box is not None:
        total = sum(stat.total_ns for phase, stat in box.host.phases.items() if phase is not Phase.load) or 1
        shares = {phase.name: stat.total_ns / total for phase, stat in box.host.phases.items() if phase is not Phase.load}
    return Row(
        view.who, process.node if process else "", process.pid if process else view.pid, process.state if process else "",
        view.main.where if view.main else view.text, box.host.phase.name if box else "", box.device.state.name if box else "",
        box.host.step if box else None, box.device.enqueued if box else None, box.device.completed if box else None, shares, odd, suspect,
        scene.box_cites.get(int(view.who), view.cite) if view.who.isdigit() else view.cite,
    )  # fmt: skip


def _excerpts(folder: Path, scene: Scene, verdict: Verdict, line: Timeline) -> tuple[Excerpt, ...]:
    """The lines that evidence and timeline cite, with those around them, and the decoded ends of the black boxes."""
    cited: dict[str, set[int]] = {}
    for evidence in verdict.evidence:
        cited.setdefault(evidence.cite.artefact, set()).add(evidence.cite.line)
    for mark in line.marks:
        cited.setdefault(mark.cite.artefact, set()).add(mark.cite.line)
    found = []
    for artefact, numbers in sorted(cited.items()):
        if artefact.endswith(".box"):
            continue
        try:
            lines = (folder / artefact).read_text(errors="replace").splitlines()
        except OSError:
            continue
        wanted = sorted(
            {n for at in numbers for n in range(max(1, at - _AROUND), min(len(lines), at + _AROUND) + 1)}
            if any(numbers)
            else range(1, min(len(lines), 12) + 1)
        )
        shown = tuple((n, lines[n - 1][:_LONGEST]) for n in wanted[:400])
        found.append(Excerpt(artefact, shown, frozenset(numbers)))
    for rank, box in sorted(scene.boxes.items()):
        first = max(0, len(box.events) - _TAIL)
        rows = [
            (n, f"{e.mono_ns / 1e9:.6f} {e.kind.name} sub={e.sub} flags={e.flags} a={e.a} b={e.b} c={e.c} d={e.d}")
            for n, e in enumerate(box.events, 1)
            if n > first
        ]
        host, device = box.host, box.device
        head = f"host: step {host.step}, phase {host.phase.name}, running {host.running}, held {host.held}; device: {device.state.name}, " \
               f"collectives {device.enqueued} enqueued, {device.completed} completed"  # fmt: skip
        found.append(
            Excerpt(
                scene.box_cites[rank].artefact, ((0, head), *rows), frozenset(cited.get(scene.box_cites[rank].artefact, set())), "decoded"
            )
        )
    return tuple(found)


def _trail(path: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            with contextlib.suppress(ValueError):
                found.append({**json.loads(text), "line": number})
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_list(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
