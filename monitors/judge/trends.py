"""Findings over many batch lines: does work flow, wait, pile up or leak, and did a silence end by itself?"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from monitors.judge.finding import Finding, many
from monitors.judge.scene import BatchLine, Log, Scene

_QUIET_S = 60.0  # under this a silence behind the last batch line says nothing, whatever the pace was
_RECOVERED_S = 60.0
_PACES = 5.0  # so many usual intervals make a silence
_FULL = 0.97
_TRANSFER = ("#transfer-req", "#transferring-req", "#inflight-req")
_USAGE = ("token usage", "full token usage", "GPU KV cache usage")
_LEAST_STUCK = 4
_STEADY_S = 60.0


def find(scene: Scene) -> Iterator[tuple[str, Finding]]:
    for log in scene.logs:
        for lines in _sequences(log):
            yield from _flow(log, lines)
            yield from _pressure(lines)
            yield from _transfer(lines)
    yield from _roles(scene)


def _sequences(log: Log) -> list[list[BatchLine]]:
    """The lines of each writer of a log; the one whose last word is newest comes last."""
    by_who: dict[str, list[BatchLine]] = {}
    for line in log.batches:
        by_who.setdefault(line.who, []).append(line)
    return list(by_who.values())


def _at(line: BatchLine) -> str:
    return f" ({line.moment})" if line.moment else ""


def gap(earlier: BatchLine, later: BatchLine) -> float | None:
    """Seconds between two lines, where both have a time of one kind."""
    return later.moment.since(earlier.moment) if later.moment and earlier.moment else None


def _flow(log: Log, lines: Sequence[BatchLine]) -> Iterator[tuple[str, Finding]]:
    last = lines[-1]
    gaps = [seconds for a, b in itertools.pairwise(lines) if (seconds := gap(a, b)) is not None]
    usual = statistics.median(gaps) if len(gaps) >= 3 else None
    quiet = log.last.since(last.moment) if log.last and last.moment else None
    silent = quiet is not None and quiet > max(_QUIET_S, _PACES * (usual or 0.0))
    if silent and last.running + last.waiting > 0 and last.progress:
        held = last.running + last.waiting
        text = f"the log goes on for {quiet:.0f} s behind the last batch line{_at(last)}, which holds {many(held, 'request')}"
        yield "log_quiet", Finding(text, last.cite)
    moved = [line for line in lines[-2:] if line.progress]
    if len(moved) == 2 and not silent:
        yield "flows", Finding(f"the last batch lines show progress, the last{_at(last)} with {last.running:.0f} running", last.cite)
    zero = list(itertools.takewhile(lambda line: not line.progress and line.running > 0, reversed(lines)))
    if len(zero) >= 2:
        text = f"{len(zero)} statistics lines in a row have no throughput and {last.running:.0f} running"
        yield "zero_lines_repeat", Finding(text, last.cite)
    # What a former start held, and what its own warm-up did, is no work of this one.
    begun = max((notice.cite.line for notice in log.notices if notice.kind in ("started", "ready")), default=0)
    for before, after in itertools.pairwise(line for line in lines if line.cite.line > begun):
        seconds = gap(before, after)
        regular = statistics.median(gaps) if len(gaps) >= 4 else 0.0
        if (
            seconds is not None
            and after.progress
            and before.running + before.waiting > 0
            and seconds >= max(_RECOVERED_S, _PACES * regular)
            and _finished(log, before, after) < before.running + before.waiting
        ):
            yield "silence_ended", Finding(f"a silence of {seconds:.0f} s with work held ended by itself: progress{_at(after)}", after.cite)


def _finished(log: Log, before: BatchLine, after: BatchLine) -> int:
    """How many requests the log says were done with between two lines."""
    return sum(notice.kind == "finished" and before.cite.line < notice.cite.line < after.cite.line for notice in log.notices)


def _pressure(lines: Sequence[BatchLine]) -> Iterator[tuple[str, Finding]]:
    last = lines[-1]
    for key in _USAGE:
        if key in last.values:
            used = last.values[key] / (100.0 if key.startswith("GPU") else 1.0)
            if used >= _FULL:
                yield "kv_full", Finding(f"the KV pool is full: {key} {last.values[key]:g}{_at(last)}", last.cite)
    waits = [line for line in lines[-3:] if line.waiting > 0]
    if len(waits) >= 2 and last.waiting > 0:
        yield (
            "queue_waits",
            Finding(f"{many(last.waiting, 'request', 'waits', 'wait')} in the last lines while {last.running:.0f} run", last.cite),
        )
    pending = [line.pending for line in lines if line.pending is not None]
    if len(pending) >= 2 and pending[-1] < pending[-2] and pending[-1] > 0:
        text = f"prefill advances: {pending[-2]:.0f} and then {pending[-1]:.0f} prompt tokens are pending"
        yield "prefill_advances", Finding(text, last.cite)


def _transfer(lines: Sequence[BatchLine]) -> Iterator[tuple[str, Finding]]:
    """Queues of a split server: what only grows there holds slots for ever, whatever still runs beside it."""
    last = lines[-1]
    key = next((key for key in _TRANSFER if key in last.values), None)
    if key is not None:
        values = [line.values[key] for line in lines if key in line.values]
        span = gap(lines[0], last)
        grows = len(values) >= 3 and all(b >= a for a, b in itertools.pairwise(values)) and values[-1] >= _LEAST_STUCK
        drained = last.running <= lines[0].running / 2
        if grows and (span is None or span >= _STEADY_S) and (values[-1] > values[0] or drained):
            ran = f"running goes from {lines[0].running:.0f} to {last.running:.0f}"
            text = f"{key} never falls: {values[0]:.0f} to {values[-1]:.0f} while {ran}"
            yield "transfer_stuck", Finding(text, last.cite)
    held = "pre-allocated usage"
    if held in last.values and last.values[held] > 0:
        same = list(itertools.takewhile(lambda line: line.values.get(held) == last.values[held], reversed(lines)))
        span = gap(same[-1], last)
        if len(same) >= 2 and span is not None and span >= _STEADY_S and last.running <= same[-1].running / 2:
            ran = f"running falls from {same[-1].running:.0f} to {last.running:.0f}"
            text = f"{held} stays at {last.values[held]:g} for {span:.0f} s while {ran}"
            yield "prealloc_stuck", Finding(text, last.cite)
    if not last.progress and last.running == 0 and last.waiting > 0 and any("External prefix" in key for key in last.values):
        yield (
            "waits_for_remote_kv",
            Finding(f"{many(last.waiting, 'request', 'waits', 'wait')} and none runs where KV comes from another server", last.cite),
        )


def _roles(scene: Scene) -> Iterator[tuple[str, Finding]]:
    """A split deployment: prefill that goes on long after decode has stopped."""
    prefill = [log.batches[-1] for log in scene.logs if log.role == "prefill" and log.batches]
    decode = [log.batches[-1] for log in scene.logs if log.role != "prefill" and log.batches]
    if not prefill or not decode:
        return
    behind = gap(decode[-1], prefill[-1])
    if behind is not None and behind >= _STEADY_S:
        text = f"prefill's last batch is {behind:.0f} s younger than decode's{_at(decode[-1])}"
        yield "decode_stops_first", Finding(text, prefill[-1].cite)
    elif behind is not None and behind <= -_STEADY_S:
        text = f"decode's last batch is {-behind:.0f} s younger than prefill's{_at(prefill[-1])}"
        yield "prefill_stops_first", Finding(text, decode[-1].cite)
