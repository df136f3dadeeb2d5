"""The last prefill and the last decode batch of each role, and how long ago. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.blackbox import BatchKind, EventKind, Snapshot
from monitors.judge.moment import Moment
from monitors.judge.scene import Cite, Clock, Log, Scene


@dataclass(frozen=True)
class LastBatch:
    """``age_s``: before the evidence was read (or the log ended); None where its times cannot be compared."""

    role: str
    kind: str  # prefill | decode
    age_s: float | None
    text: str
    cite: Cite

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "cite": f"{self.cite.artefact}:{self.cite.line}" if self.cite.line else self.cite.artefact}


def last(scene: Scene, roles: Mapping[str, str], now: Moment | None = None) -> tuple[LastBatch, ...]:
    """By role and kind, the youngest. ``roles``: of an artefact whose name does not say it. ``now``: when a live log was
    read; without it a log's last line stands in."""
    found: dict[tuple[str, str], LastBatch] = {}
    for one in (*_boxes(scene), *(batch for log in scene.logs for batch in _log(log, roles, now))):
        known = found.get((one.role, one.kind))
        if known is None or known.age_s is None or (one.age_s is not None and one.age_s < known.age_s):
            found[one.role, one.kind] = one
    return tuple(sorted(found.values(), key=lambda one: (one.role, one.kind != "prefill")))


def _boxes(scene: Scene) -> Iterator[LastBatch]:
    """The leaders' rings: exact, also where the log names batches only now and then."""
    for rank, box in scene.boxes.items():
        if box.header.tp == 0 and rank in scene.clocks:
            yield from _ring(box, scene.clocks[rank], scene.box_cites.get(rank, Cite(f"rank-{rank}.box")))


def _ring(box: Snapshot, clock: Clock, cite: Cite) -> Iterator[LastBatch]:
    for kind, subs in (("prefill", (BatchKind.prefill,)), ("decode", (BatchKind.decode, BatchKind.verify))):
        begun = next((e for e in reversed(box.events) if e.kind is EventKind.batch_begin and e.sub in subs), None)
        if begun is None:
            continue
        ended = any(e.kind is EventKind.batch_end and e.a == begun.a for e in box.events)
        text = f"step {begun.a}, {begun.flags} requests, {BatchKind(begun.sub).name}" + ("" if ended else ", NOT ENDED")
        yield LastBatch(box.header.role, kind, (clock.mono_ns - begun.mono_ns) / 1e9, text, cite)


def _log(log: Log, roles: Mapping[str, str], now: Moment | None) -> Iterator[LastBatch]:
    role = roles.get(log.artefact) or log.role or "both"
    end = now or log.last
    for kind in ("prefill", "decode"):
        batch = next((b for b in reversed(log.batches) if b.progress and _kind(b.kind) in (kind, "")), None)
        if batch is None:
            continue
        age = end.since(batch.moment) if end and batch.moment else None
        text = f"{batch.running:.0f} running, {batch.waiting:.0f} waiting, logged {batch.moment or 'without a time'}"
        yield LastBatch(role, kind, max(0.0, age) if age is not None else None, text, batch.cite)


def _kind(word: str) -> str:
    """Empty for an engine whose lines tell of both at once."""
    low = word.lower()
    return low if low in ("prefill", "decode") else ""
