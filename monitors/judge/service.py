"""Findings about the service: its log, its health routes, its restarts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from monitors.engines.dialect import NoticeKind
from monitors.judge.finding import Finding
from monitors.judge.scene import Log, Scene

_KINDS: tuple[NoticeKind, ...] = ("watchdog", "peer_wait", "rpc_timeout", "health_failed", "memory", "killed", "crash", "exit")


def log(scene: Scene) -> Iterator[tuple[str, Finding]]:
    """The end of the log: what the last lines with a meaning say, and whether batches went on after them."""
    for one in scene.logs:
        if one.batches:
            last = one.batches[-1]
            held = last.running + last.waiting
            if held > 0 and not last.progress:
                yield "idle_line_with_work", Finding(f"the last statistics line has no throughput and {held:.0f} requests", last.cite)
            if held > 0:
                yield "batches_end_with_work", Finding(f"the last batch line holds {held:.0f} requests", last.cite)
            trouble = [n for n in one.notices if n.kind in ("health_failed", "peer_wait")]
            if trouble and last.progress and last.cite.line > trouble[-1].cite.line:
                yield "batches_go_on", Finding("batch lines with progress follow the complaint", last.cite)
        ready = [n.cite.line for n in one.notices if n.kind == "ready"]
        loads = [n for n in one.notices if n.kind == "loading"]
        if loads and not one.batches and (not ready or loads[-1].cite.line > ready[-1]):
            yield "loading", Finding(f"loading and not yet ready: {loads[-1].text[:120]}", loads[-1].cite)
    current = [_life(one) for one in scene.logs]
    for kind in _KINDS:
        notices = [notice for one in current for notice in one.notices if notice.kind == kind]
        if notices:
            times = f" ({len(notices)} times)" if len(notices) > 1 else ""
            yield kind, Finding(f"log: {notices[-1].text[:200]}{times}", notices[-1].cite)
    timeouts = scene.notices("collective_timeout")
    if len(timeouts) > 1:
        entered = {(n.fields["seq"], n.fields["op"], n.fields["numel"]) for n in timeouts}
        name = "timeouts_differ" if len(entered) > 1 else "timeouts_equal"
        sides = "; ".join(
            f"rank {n.fields['rank']} {n.fields['op']} {n.fields['seq']} with {n.fields['numel']} elements" for n in timeouts[:4]
        )
        yield name, Finding(f"collectives timed out: {sides}", timeouts[0].cite)
    recorded = scene.notices("recorder")
    if len(recorded) > 1 and len({n.fields["seq"] for n in recorded}) == 1:
        yield "enqueued_equal", Finding(f"every rank has enqueued {recorded[0].fields['seq']} collectives", recorded[0].cite)


def health(scene: Scene) -> Iterator[tuple[str, Finding]]:
    ok = [h for h in scene.health if h.status == 200]
    bad = [h for h in scene.health if h.status != 200]
    if ok and not bad:
        yield "health_ok", Finding(f"GET {ok[-1].route} says 200 all the same", ok[-1].cite)
    if bad:
        yield "health_down", Finding(f"GET {bad[-1].route} says {bad[-1].status or 'nothing'}", bad[-1].cite)
    restarts = scene.notices("restart")
    if restarts:
        last = restarts[-1]
        name = "restarts" if int(last.fields.get("count", "1")) >= 2 or len(restarts) >= 2 else "restart"
        yield name, Finding(f"service manager: {last.text[:160]}", last.cite)
    tracebacks = [t for one in scene.logs for t in _life(one).tracebacks]
    if tracebacks:
        last_one = tracebacks[-1]
        what = f"{last_one.kind}: {last_one.message}" if last_one.kind else "the exception's own line is cut off"
        yield "traceback", Finding(f"traceback: {what}", last_one.cite)
        alike = {t.invocation for t in tracebacks if t.invocation and (t.kind, t.message) == (last_one.kind, last_one.message)}
        if len(alike) > 1:
            yield "traceback_repeats", Finding(f"{len(alike)} invocations ended in the same {last_one.kind or 'exception'}", last_one.cite)


def _life(one: Log) -> Log:
    """A log without what belongs to an earlier life of the server. A journal tells lives apart by itself; in a plain
    file the last line that says ready begins the last one, unless nothing has gone wrong since (then what went wrong
    before it is why the server was started again)."""
    ready = max((n.cite.line for n in one.notices if n.kind == "ready"), default=0)
    later = [t.cite.line for t in one.tracebacks if t.cite.line > ready] + [n.cite.line for n in one.notices if n.cite.line > ready]
    if one.starts or not ready or not later:
        return one
    notices = tuple(n for n in one.notices if n.cite.line >= ready)
    return replace(one, notices=notices, tracebacks=tuple(t for t in one.tracebacks if t.cite.line >= ready))
