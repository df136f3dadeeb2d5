"""Everything that happened, on one UTC axis: black boxes, log lines, the monitor, the capture itself.

Each node's clocks are brought to ours by the offset that the capture measured. What a log's time leaves out (a zone, a
date) is assumed and marked so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.blackbox import BatchKind, DeviceState, EventKind, Snapshot
from monitors.judge.scene import Cite, Clock, Scene
from monitors.observe.gpu import _SIMULATED, simulate

_BIN_S = 0.2


@dataclass(frozen=True)
class Mark:
    """A moment. ``kind`` is a style's name; ``assumed`` marks a time whose zone is only assumed."""

    unix_s: float
    lane: str
    kind: str
    text: str
    cite: Cite
    assumed: bool = False


@dataclass(frozen=True)
class Span:
    begin_s: float
    end_s: float
    lane: str
    kind: str
    text: str
    cite: Cite


@dataclass(frozen=True)
class Curve:
    """``points`` are (unix seconds, value); ``source`` says where they come from."""

    name: str
    unit: str
    points: tuple[tuple[float, float], ...]
    source: str
    cite: Cite
    limit: float | None = None


@dataclass
class Timeline:
    marks: list[Mark] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    steps: list[Curve] = field(default_factory=list)
    gpus: list[tuple[str, Curve, Curve]] = field(default_factory=list)  # name, utilisation, power
    last_progress_s: float | None = None
    end_s: float = 0.0

    def lane(self, name: str) -> str:
        if name not in self.lanes:
            self.lanes.append(name)
        return name


def build(scene: Scene, manifest: Mapping[str, Any], trail: Sequence[Mapping[str, Any]], suspicion: Mapping[str, Any]) -> Timeline:
    """The timeline of a bundle. ``trail`` are the monitor's samples."""
    line = Timeline()
    offsets = {node: float(clock["offset_s"]) for node, clock in manifest.get("clocks", {}).items()}
    items = [item for item in manifest["items"] if item["outcome"] == "taken" and item["probe"] != "report"]
    line.end_s = max((_unix(item["end"]) for item in items), default=_unix(manifest["created_utc"]))
    nodes = {item["rank"]: item["node"] for item in items if item["probe"] == "black_box"}
    for rank, box in sorted(scene.boxes.items()):
        clock = scene.clocks.get(rank)
        if clock is not None and clock.unix_ns:
            stopped = any(process.rank == rank and process.state.startswith("T") for process in scene.processes)
            _box(line, rank, box, clock, offsets.get(nodes.get(rank, ""), 0.0), scene.box_cites[rank], stopped=stopped)
    for log in scene.logs:
        _log(line, log)
    if suspicion.get("utc"):
        at = _unix(suspicion["utc"])
        line.marks.append(Mark(at, line.lane("monitor"), "suspect", f"suspicion after {suspicion['quiet_s']} s", Cite("suspicion.json", 2)))
    created = _unix(manifest["created_utc"])
    line.marks.append(Mark(created, line.lane("monitor"), "declared", f"capture begins: {manifest['reason']}", Cite("manifest.json", 4)))
    for item in items:
        if item["start"] != item["end"] or item["probe"] == "stacks":
            text = f"{item['probe']}: {item['path']}"
            line.spans.append(Span(_unix(item["start"]), _unix(item["end"]), line.lane("capture"), "probe", text,
                                   Cite(item["path"])))  # fmt: skip
    _trail(line, trail)
    return line


def _box(line: Timeline, rank: int, box: Snapshot, clock: Clock, offset_s: float, cite: Cite, *, stopped: bool) -> None:
    def unix(mono_ns: int) -> float:
        return (clock.unix_ns + mono_ns - clock.mono_ns) / 1e9 - offset_s

    lane = line.lane(f"rank {rank}")
    begun: dict[int, tuple[float, str]] = {}
    ends: list[float] = []
    states: list[tuple[float, DeviceState]] = []
    for number, event in enumerate(box.events, 1):
        at = unix(event.mono_ns)
        if event.kind is EventKind.batch_begin:
            kind = BatchKind(event.sub).name if event.sub in BatchKind._value2member_map_ else "decode"
            begun[event.a] = (at, kind)
        elif event.kind is EventKind.batch_end and event.a in begun:
            start, kind = begun.pop(event.a)
            text = f"step {event.a}: {kind} of {event.flags} requests, {(at - start) * 1000:.1f} ms"
            line.spans.append(Span(start, at, lane, kind, text, Cite(cite.artefact, number)))
            ends.append(at)
        elif event.kind is EventKind.abort:
            line.marks.append(Mark(at, lane, "abort", f"abort of request {event.a:016x}", Cite(cite.artefact, number)))
        elif event.kind is EventKind.device_begin:
            states.append((at, DeviceState.compute))
        elif event.kind is EventKind.device_end:
            states.append((at, DeviceState.idle))
        elif event.kind is EventKind.collective_enqueued:
            states.append((at, DeviceState.collective))
        elif event.kind is EventKind.collective_completed:
            states.append((at, DeviceState.compute))
    seen = unix(clock.mono_ns)
    for step, (start, kind) in begun.items():
        text = f"step {step}: {kind} begun and never ended ({seen - start:.1f} s at the capture)"
        line.spans.append(Span(start, seen, lane, "open", text, cite))
    if stopped and box.events:
        text = "nothing more was recorded: the process is stopped (state T)"
        line.spans.append(Span(unix(box.events[-1].mono_ns), seen, lane, "stopped", text, cite))
    progress = unix(box.host.progress_ns)
    if box.host.progress_ns:
        line.last_progress_s = max(line.last_progress_s or 0.0, progress)
    if ends:
        line.steps.append(Curve(f"rank {rank}", "steps/s", _rate(ends, ends[0], seen), "batch_end events", cite))
    if states:
        name = f"GPU of rank {rank}"
        util, power = _simulated(states, seen)
        limit = simulate(box, "").limit_w
        line.gpus.append((name, Curve(name, "%", util, "simulated from the black box", cite, 100.0),
                          Curve(name, "W", power, "simulated from the black box", cite, limit)))  # fmt: skip


def _rate(ends: Sequence[float], begin: float, until: float) -> tuple[tuple[float, float], ...]:
    bins = [0] * (max(1, int((until - begin) / _BIN_S)) + 1)
    for at in ends:
        bins[min(len(bins) - 1, int((at - begin) / _BIN_S))] += 1
    return tuple((begin + i * _BIN_S, count / _BIN_S) for i, count in enumerate(bins))


def _simulated(
    states: Sequence[tuple[float, DeviceState]], until: float
) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
    """Means over bins of what a GPU would show in the states that the stream went through."""
    begin = states[0][0]
    count = max(1, int((until - begin) / _BIN_S) + 1)
    util, power = [0.0] * count, [0.0] * count
    later = [at for at, _ in states[1:]] + [until]
    for (at, state), end in zip(states, later, strict=True):
        u, _, w = _SIMULATED[state]
        first, last = int((at - begin) / _BIN_S), min(count - 1, int((end - begin) / _BIN_S))
        for i in range(first, last + 1):
            share = max(0.0, min(end, begin + (i + 1) * _BIN_S) - max(at, begin + i * _BIN_S)) / _BIN_S
            util[i] += share * u
            power[i] += share * w
    full = count - 1 if count > 1 else count  # the last bin is cut short by the capture
    times = [begin + (i + 0.5) * _BIN_S for i in range(full)]
    return tuple(zip(times, util, strict=False)), tuple(zip(times, power, strict=False))


def _log(line: Timeline, log: Any) -> None:
    lane = "log " + (log.artefact.removesuffix(".log").removesuffix(".jsonl").partition(".")[2] or log.artefact)[:14]
    for batch in log.batches:
        moment = getattr(batch, "moment", None)
        if moment is not None and moment.date and moment.year:
            text = f"{batch.kind} batch: {batch.running:g} running, {batch.waiting:g} waiting"
            line.marks.append(Mark(moment.unix_s, line.lane(lane), batch.kind.lower(), text, batch.cite, not moment.zone))
    for notice in log.notices:
        moment = getattr(notice, "moment", None)
        if moment is not None and moment.date and moment.year:
            line.marks.append(
                Mark(moment.unix_s, line.lane(lane), "notice", f"{notice.kind}: {notice.text[:120]}", notice.cite, not moment.zone)
            )


def _trail(line: Timeline, trail: Sequence[Mapping[str, Any]]) -> None:
    """The monitor's own samples: measured GPU readings take the place of simulated ones."""
    rows: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    lane, before = "monitor", ""
    for sample in trail:
        at = float(sample["unix_s"])
        if sample.get("state") != before:
            before = str(sample.get("state"))
            line.marks.append(
                Mark(at, line.lane(lane), "state", f"state: {before}", Cite("monitor/trail.jsonl", int(sample.get("line", 0))))
            )
        for gpu in sample.get("gpus", ()):
            rows.setdefault(f"GPU {gpu['index']} on {gpu['node']}", []).append((at, gpu))
    if rows:
        line.gpus.clear()
    for name, found in sorted(rows.items()):
        util = tuple((at, float(gpu["util"])) for at, gpu in found if gpu.get("util") is not None)
        power = tuple((at, float(gpu["power_w"])) for at, gpu in found if gpu.get("power_w") is not None)
        limit = next((float(gpu["limit_w"]) for _, gpu in found if gpu.get("limit_w")), None)
        cite = Cite("monitor/trail.jsonl", 1)
        line.gpus.append((name, Curve(name, "%", util, "measured", cite, 100.0), Curve(name, "W", power, "measured", cite, limit)))


def _unix(stamp: str) -> float:
    import datetime as dt

    return dt.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
