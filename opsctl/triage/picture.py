"""All that triage knows, and the picture of it that a folder of evidence gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from monitors import casefolder
from monitors.judge.moment import Moment
from monitors.judge.progress import State
from monitors.judge.ranks import RankView, odd_ones, views
from monitors.judge.scene import Gpu, Missing, Scene, Traceback, Unit
from monitors.report import stacktree
from opsctl.triage import batches, flags
from opsctl.triage.batches import LastBatch
from opsctl.triage.faults import Fault, faults
from opsctl.triage.flags import Flag

_METRICS = ("running", "waiting", "progress")


@dataclass(frozen=True)
class ServiceRow:
    """A service as its manager tells it. ``error``: why it could not be asked."""

    name: str
    node: str
    role: str
    state: str = ""
    invocation: str = ""
    pid: int = 0
    restarts: int = 0
    result: str = ""
    age_s: float | None = None
    tracebacks: tuple[str, ...] = ()  # of this invocation only
    error: str = ""


@dataclass(frozen=True)
class RankRow:
    rank: str
    node: str
    pid: int
    state: str
    phase: str
    device: str
    stands: str
    odd: bool


@dataclass(frozen=True)
class Seen:
    """What the looks of this triage saw: ``quiet_s`` of ``looked_s`` nothing moved although work was held."""

    state: str = ""
    held: float = 0.0
    quiet_s: float = 0.0
    looked_s: float = 0.0


@dataclass(frozen=True)
class Incident:
    """A bundle that was taken of this start of the server; ``reason``: by whom or for what."""

    id: str
    verdict: str
    created_utc: str
    path: str
    reason: str = ""


@dataclass(frozen=True)
class Picture:
    source: str
    engine: str
    faults: tuple[Fault, ...]
    batches: tuple[LastBatch, ...]
    flags: tuple[Flag, ...]
    files: tuple[Flag, ...]
    ranks: tuple[RankRow, ...]
    trees: Sequence[tuple[str, list[stacktree.Node]]]
    gpus: tuple[Gpu, ...]
    metrics: Mapping[str, float]
    health: tuple[str, ...]
    tracebacks: tuple[str, ...]
    missing: tuple[Missing, ...]
    services: tuple[ServiceRow, ...] = ()
    seen: Seen | None = None
    incidents: tuple[Incident, ...] = ()
    seconds: float = 0.0
    saved: str = ""
    where: str = ""  # --fleet and --deployment, as commands about it take them
    scene: Scene | None = field(default=None, repr=False)

    @property
    def alarms(self) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.is_alarm)

    @property
    def down(self) -> tuple[ServiceRow, ...]:
        """Services that their manager says do not run."""
        return tuple(row for row in self.services if row.state in ("inactive", "failed"))

    @property
    def is_down(self) -> bool:
        """Whether not one of its services runs, by what their managers say."""
        return bool(self.down) and len(self.down) == len(self.services)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source, "engine": self.engine, "faults": [fault.to_json() for fault in self.faults],
            "services": [asdict(row) for row in self.services], "batches": [one.to_json() for one in self.batches],
            "seen": asdict(self.seen) if self.seen else None, "flags": [flag.to_json() for flag in self.flags],
            "files": [flag.to_json() for flag in self.files], "ranks": [asdict(row) for row in self.ranks],
            "stacks": [{"thread": name, "roots": [_node(node) for node in roots]} for name, roots in self.trees],
            "gpus": [{key: value for key, value in asdict(gpu).items() if key != "cite"} for gpu in self.gpus],
            "metrics": dict(self.metrics), "health": list(self.health), "tracebacks": list(self.tracebacks),
            "incidents": [asdict(one) for one in self.incidents], "missing": [asdict(gap) for gap in self.missing],
            "seconds": round(self.seconds, 3), "saved": self.saved,
        }  # fmt: skip


def of_folder(folder: Path, *, units: Sequence[Unit] = (), roles: Mapping[str, str] | None = None, now: Moment | None = None,
              commands: Sequence[Sequence[str]] = (), looked: Seen | None = None) -> Picture:  # fmt: skip
    """The picture that a case folder or a bundle gives. Raises CaseError when it holds nothing that can be read.

    Args:
        units, commands, looked: what is known beside the folder, of a live deployment.
        roles: of logs by their names. now: when the logs were read.
    """
    scene = casefolder.read(folder)
    scene = replace(scene, units=(*scene.units, *units), **progress(looked))
    ranks = views(scene)
    odd = {view.who for view in odd_ones(ranks)}
    known = flags.flags(scene, commands)
    names = scene.dialect.metrics
    wanted = {key for group in _METRICS for key in getattr(names, group)}
    return Picture(
        source=str(folder),
        engine=scene.dialect.name,
        faults=faults(scene),
        batches=batches.last(scene, roles or {}, now),
        flags=known,
        files=flags.files(flags.model_folder(known), None, "a folder of evidence does not hold the model"),
        ranks=tuple(_rank(view, view.who in odd) for view in ranks),
        trees=stacktree.merge(scene.stacks, sorted(odd)),
        gpus=scene.gpus,
        metrics={key: value for key, value in sorted(scene.metrics.items()) if key in wanted},
        health=tuple(f"{h.route} {h.status or 'no answer'} in {h.seconds:.2f} s" for h in scene.health),
        tracebacks=tuple(_told(one) for log in scene.logs for one in log.tracebacks if _of_last_start(one, log.starts)),
        missing=scene.missing,
        scene=scene,
    )


def progress(looked: Seen | None) -> dict[str, Any]:
    """What looking over some seconds adds to the evidence of one moment: a stall or an end, as the monitor declares them."""
    if looked is not None and looked.state == State.stalled:
        return {"stalled_s": looked.quiet_s}
    return {"ended": True} if looked is not None and looked.state == State.ended else {}


def _of_last_start(one: Traceback, starts: Sequence[str]) -> bool:
    return not starts or one.invocation == starts[-1]


def _told(one: Traceback) -> str:
    what = f"{one.kind}: {one.message}" if one.kind else "cut off before the exception's own line"
    return f"{what}  [{one.cite.artefact}:{one.cite.line}]"


def _rank(view: RankView, odd: bool) -> RankRow:
    box, process = view.box, view.process
    return RankRow(
        view.who, process.node if process else "", process.pid if process else view.pid, process.state if process else "",
        box.host.phase.name if box else "", box.device.state.name if box else "", view.main.where if view.main else view.text, odd,
    )  # fmt: skip


def _node(node: stacktree.Node) -> dict[str, Any]:
    return {"frames": node.frames, "ranks": node.who, "odd": node.odd, "children": [_node(child) for child in node.children]}
