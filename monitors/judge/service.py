"""Findings about the service: its log, its health routes, its restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from monitors.engines.dialect import NoticeKind
from monitors.judge import ending
from monitors.judge.finding import Finding, many
from monitors.judge.scene import Cite, Log, Scene

_KINDS: tuple[NoticeKind, ...] = (
    "watchdog", "peer_wait", "rpc_timeout", "health_failed", "memory", "killed", "crash", "exit", "retraction", "transfer_error",
    "grammar_error", "compiling", "device_lost", "network", "probe_refused", "fallback", "native_frames", "orderly", "no_memory_free",
)  # fmt: skip
_OF_THE_END = frozenset({"exit", "killed", "native_frames"})  # what a process that was told to stop may say while it does
_SURVIVABLE = frozenset({"crash", "native_frames", "memory", "killed", "device_lost"})
_HEALTH_ROUTES = ("/health", "/healthz", "/ping", "/v1/models", "/health_generate", "/readyz", "/livez", "/api/ps", "/health/ready")
_STILL_SAYS = 400  # an access line's status from here on is a refusal


def log(scene: Scene) -> Iterator[tuple[str, Finding]]:
    """The end of the log: what the last lines with a meaning say, and whether batches went on after them."""
    for one in sorted(scene.logs, key=lambda log: log.role == "prefill"):  # of a split server, decode holds the requests
        if one.batches:
            last = one.batches[-1]
            held = last.running + last.waiting
            if held > 0 and not last.progress:
                yield "idle_line_with_work", Finding(f"the last statistics line has no throughput and {many(held, 'request')}", last.cite)
            if held > 0:
                at = f" ({last.moment})" if last.moment else ""
                yield "batches_end_with_work", Finding(f"the last batch line{at} holds {many(held, 'request')}", last.cite)
            trouble = [n for n in one.notices if n.kind in ("health_failed", "peer_wait")]
            if trouble and last.progress and last.cite.line > trouble[-1].cite.line:
                yield "batches_go_on", Finding("batch lines with progress follow the complaint", last.cite)
        ready = [n.cite.line for n in one.notices if n.kind == "ready"]
        loads = [n for n in one.notices if n.kind == "loading"]
        worked = [line for line in one.batches if line.progress and line.running > 0]
        if loads and (not ready or loads[-1].cite.line > ready[-1]) and (not worked or worked[-1].cite.line < loads[-1].cite.line):
            yield "loading", Finding(f"loading and not yet ready: {loads[-1].text[:120]}", loads[-1].cite)
        if one.repeat is not None:
            often = f", {one.repeat.per_s:.0f} a second" if one.repeat.per_s else ""
            yield (
                "log_spins",
                Finding(f"the log ends in the same words {one.repeat.count} times{often}: {one.repeat.text[:120]}", one.repeat.cite),
            )
    current = [_life(one, scene.ended) for one in scene.logs]
    for kind in _KINDS:
        notices = [notice for one in current for notice in one.notices if notice.kind == kind and not ending.asked_for(notice)]
        if notices:
            same = sum(ending.words(notice.text) == ending.words(notices[-1].text) for notice in notices)
            times = f" ({same} times)" if same > 1 else ""
            lived = kind in _SURVIVABLE and _survived(scene, notices[-1].cite)
            yield f"{kind}_survived" if lived else kind, Finding(f"log: {notices[-1].text[:200]}{times}", notices[-1].cite)


def health(scene: Scene) -> Iterator[tuple[str, Finding]]:
    """What health routes say, as a monitor asked them or as an access log has it."""
    ok = [h for h in scene.health if h.status == 200]
    bad = [h for h in scene.health if h.status != 200]
    if ok and not bad:
        yield "health_ok", Finding(f"GET {ok[-1].route} says 200", ok[-1].cite)
    if bad:
        yield "health_down", Finding(f"GET {bad[-1].route} says {bad[-1].status or 'nothing'}", bad[-1].cite)
    if not scene.health:
        seen = [access for one in scene.logs for access in one.accesses if access.route in _HEALTH_ROUTES]
        if seen and seen[-1].status == 200:
            yield "health_ok", Finding(f"{seen[-1].method} {seen[-1].route} is answered with 200 in the log", seen[-1].cite)
        elif seen and seen[-1].status >= _STILL_SAYS:
            yield "health_down", Finding(f"{seen[-1].method} {seen[-1].route} is answered with {seen[-1].status}", seen[-1].cite)


def ends(scene: Scene) -> Iterator[tuple[str, Finding]]:
    """Restarts, exits and the exceptions before them."""
    present = [ending.present(one) for one in scene.logs]
    restarts = [notice for one in present for notice in one.notices if notice.kind == "restart"]
    if restarts:
        last = restarts[-1]
        counts = [int(n.fields["count"][:9]) for n in restarts if n.fields.get("count")]
        # A counter counts whatever ended: what was of another kind is no part of a loop.
        others = sum(ending.others(one) for one in present)
        many = max([*counts, len(restarts)]) - others >= 2 or "too quickly" in last.text
        name = "restarts" if many else "restart"
        starts = [one.starts for one in scene.logs if len(one.starts) > 1]
        lives = (
            f"; {len(starts[0])} invocations in the journal, the first automatic restart at line {restarts[0].cite.line}" if starts else ""
        )
        yield name, Finding(f"service manager: {last.text[:160]}{lives}", last.cite)
    yield from _units(scene)
    orders = [order for one in scene.logs if (order := ending.order(one))]
    if orders:
        yield "ordered", Finding(f"the server was told to stop: {orders[-1].text[:160]}", orders[-1].cite)
    tracebacks = [t for one in scene.logs for t in _life(one, scene.ended).tracebacks if t.kind.rpartition(".")[2] not in ending.OF_A_STOP]
    if tracebacks:
        last_one = tracebacks[-1]
        what = f"{last_one.kind}: {last_one.message}" if last_one.kind else "the log is cut before the exception's own line"
        name = "traceback_survived" if _survived(scene, last_one.cite) else "traceback"
        yield name, Finding(f"traceback: {what}\n{last_one.text}", last_one.cite)
        alike = {t.invocation for t in tracebacks if t.invocation and (t.kind, t.message) == (last_one.kind, last_one.message)}
        if len(alike) > 1:
            yield "traceback_repeats", Finding(f"{len(alike)} invocations ended in the same {last_one.kind or 'exception'}", last_one.cite)


def _units(scene: Scene) -> Iterator[tuple[str, Finding]]:
    for unit in scene.units:
        values, cites = unit.values, unit.cites

        def cite(key: str, cites: Mapping[str, Cite] = cites) -> Cite:
            return cites.get(key, Cite("systemctl-show.txt"))

        restarts = values.get("NRestarts", "0")
        if restarts.isdigit() and int(restarts[:9]) - sum(ending.others(one) for one in scene.logs) >= 2:
            yield "restarts", Finding(f"the service manager has restarted the unit {restarts} times", cite("NRestarts"))
        attempts = values.get("FailedAttempts", "0")
        if attempts.isdigit() and int(attempts[:9]) >= 2:
            yield "restarts", Finding(f"{attempts} attempts ended, the last with status {values.get('LastExit')}", cite("FailedAttempts"))
        result = values.get("Result", "")
        if result == "oom-kill":
            yield "memory", Finding("the unit's result is oom-kill", cite("Result"))
        elif result == "start-limit-hit":
            yield "restarts", Finding("the unit was restarted until its start limit", cite("Result"))
        elif result == "watchdog":
            yield "watchdog", Finding("the service manager's watchdog ended the unit", cite("Result"))
        elif result in ("signal", "core-dump", "exit-code"):
            yield "exit", Finding(f"the unit's result is {result}", cite("Result"))
        state = values.get("ActiveState", "")
        if state == "activating" and values.get("SubState") != "auto-restart":
            yield "loading", Finding("the unit is started and not yet ready (activating)", cite("ActiveState"))
        if state in ("failed", "inactive"):
            text = f"the unit is {state} ({values.get('SubState', '')}), its last exit status {values.get('ExecMainStatus', 'not told')}"
            yield "unit_down", Finding(text, cite("ActiveState"))


def _survived(scene: Scene, cite: Cite) -> bool:
    """Whether batches went on in the same log behind a line that looks like an end."""
    return any(sum(1 for line in one.batches if line.progress and line.cite.line > cite.line) >= 2 for one in scene.logs
               if one.artefact == cite.artefact)  # fmt: skip


def _life(one: Log, ended: bool) -> Log:
    """A log without what belongs to an earlier life of the server. Where starts have names (a journal, opsctl's supervisor)
    a life that got ready and raised nothing since has no traceback, unless the server was seen to end: then it may be the
    next one already. In another file the last line that says ready begins the last life, unless nothing has gone wrong since
    (then what went wrong before it is why the server was started again). What it says of its end once it was told to stop
    is not in it."""
    one = ending.present(one)
    order = ending.order(one)
    if order is not None:
        one = replace(one, notices=tuple(n for n in one.notices if n.kind not in _OF_THE_END or n.cite.line < order.cite.line),
                      tracebacks=tuple(t for t in one.tracebacks if t.cite.line < order.cite.line))  # fmt: skip
    if one.starts:
        last = one.starts[-1]
        ready = any(notice.kind == "ready" and notice.invocation == last for notice in one.notices)
        raised = any(trace.invocation == last for trace in one.tracebacks)
        return replace(one, tracebacks=()) if ready and not raised and not ended else one
    begun = max((n.cite.line for n in one.notices if n.kind == "ready"), default=0)
    later = [t.cite.line for t in one.tracebacks if t.cite.line > begun] + [n.cite.line for n in one.notices if n.cite.line > begun]
    if not begun or not later:
        return one
    notices = tuple(n for n in one.notices if n.cite.line >= begun)
    return replace(one, notices=notices, tracebacks=tuple(t for t in one.tracebacks if t.cite.line >= begun))
