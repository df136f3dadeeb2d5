"""Findings about work: is any held, does it move, and who says so?"""

from __future__ import annotations

from collections.abc import Iterator

from engine.blackbox import Phase
from monitors.judge.finding import Finding, many
from monitors.judge.scene import Cite, Log, Scene

# Without a monitor's own word, a held request whose ranks have given nothing for this long stands still. On-demand
# captures of a working server must not read as a hang, and a step of a large prefill takes seconds.
_STILL_S = 10.0


def find(scene: Scene) -> Iterator[tuple[str, Finding]]:
    if scene.stalled_s is not None:
        yield "no_progress", Finding(f"work was held and nothing progressed for {scene.stalled_s:.1f} s", Cite("progress.json"))
    if scene.ended:
        yield "ended", Finding("the monitor saw the server's processes end without an ordered shutdown", Cite("progress.json"))
    if scene.ends > 1:
        yield "ends_repeat", Finding(f"{scene.ends} invocations ended so, one after another", Cite("progress.json"))
    if scene.boxes:
        yield from _boxes(scene)
    else:
        yield from _metrics(scene)
    for log in scene.logs:
        yield from _requests(log)
    yield from _clients(scene)


def _boxes(scene: Scene) -> Iterator[tuple[str, Finding]]:
    leaders = [box for box in scene.boxes.values() if box.header.tp == 0] or list(scene.boxes.values())
    held = sum(max(box.host.held, box.host.running + box.host.waiting) for box in leaders)
    cite = scene.box_cites.get(leaders[0].header.rank, Cite(f"rank-{leaders[0].header.rank}.box"))
    if held:
        yield "work_held", Finding(f"{many(held, 'request', 'is', 'are')} received and not answered", cite)
    else:
        yield "nothing_held", Finding("no request is held", cite)
    loading = [box for box in scene.boxes.values() if box.host.phase in (Phase.load, Phase.capture)]
    if loading:
        yield "loading", Finding(f"{len(loading)} of {len(scene.boxes)} ranks are loading", cite)
    moved = [max(box.host.progress_ns, box.device.mono_ns) for box in scene.boxes.values()]
    ages = [(scene.clocks[rank].mono_ns - ns) / 1e9 for rank, ns in zip(scene.boxes, moved, strict=True) if rank in scene.clocks]
    if ages and held and scene.stalled_s is None:
        quiet = min(ages)
        name = "no_progress" if quiet >= _STILL_S else "progress"
        yield name, Finding(f"the last result of a batch or move of a stream was {quiet:.1f} s before the black box was read", cite)


def _metrics(scene: Scene) -> Iterator[tuple[str, Finding]]:
    """Counters speak before gauges: a gauge keeps its last value through a hang, and may be stuck at zero."""
    names, cite = scene.dialect.metrics, Cite("metrics.txt")
    running, waiting = (sum(scene.metrics.get(key, 0.0) for key in keys) for keys in (names.running, names.waiting))
    if running + waiting > 0:
        yield "work_held", Finding(f"the gauges say {running:.0f} running and {waiting:.0f} waiting", cite)
    elif any(key in scene.metrics for key in names.running):
        yield "gauges_zero", Finding("the gauges say that nothing runs or waits", cite)
    before = [scene.metrics_before[key] for key in names.progress if key in scene.metrics_before]
    after = [scene.metrics[key] for key in names.progress if key in scene.metrics]
    if before and after:
        grown = sum(after) - sum(before)
        if grown > 0:
            yield "counters_move", Finding(f"the token counters grew by {grown:.0f} between two samples", cite)
        elif grown == 0:
            yield "counters_flat", Finding("the token counters are the same in two samples", cite)
    leaks = {key: value for key, value in scene.metrics.items() if "leak" in key.lower() and value > 0}
    for key, value in leaks.items():
        yield "leak_counter", Finding(f"{key} is {value:g}", cite)
        break


def _requests(log: Log) -> Iterator[tuple[str, Finding]]:
    """Requests that came in after the last batch and were neither batched nor finished. Accepted and never batched is
    a stall that no running count shows."""
    last_batch = max((line.cite.line for line in log.batches if line.progress), default=0)
    ready = max((notice.cite.line for notice in log.notices if notice.kind == "ready"), default=0)
    accepted = [notice for notice in log.notices if notice.kind == "accepted" and notice.cite.line > last_batch]
    finished = [notice for notice in log.notices if notice.kind == "finished" and notice.cite.line > last_batch]
    posts = [access for access in log.accesses if access.method == "POST" and access.cite.line > max(last_batch, ready)]
    if len(accepted) > len(finished):
        asked = many(len(accepted) - len(finished), "request", "was", "were")
        text = f"{asked} received after the last batch line and not finished"
        yield "accepted_unanswered", Finding(text, accepted[-1].cite)
    elif len(posts) >= 2 and not log.batches and ready:
        yield (
            "posts_unbatched",
            Finding(f"{len(posts)} requests were accepted since the server is ready and no batch line came", posts[-1].cite),
        )
    generate = [access for access in log.accesses if access.status == 200 and "generate" in access.route and access.method == "GET"]
    if len(generate) >= 2 and not log.batches:
        text = f"{len(generate)} generating probes were answered with 200 and no batch line stands between them"
        yield "probe_without_batch", Finding(text, generate[-1].cite)
    if log.batches and not log.batches[-1].progress and log.batches[-1].running + log.batches[-1].waiting == 0:
        last = log.batches[-1]
        if not any(notice.cite.line > last.cite.line for notice in log.notices if notice.kind == "accepted"):
            yield "log_idle", Finding("the last statistics line has nothing running and nothing waiting", last.cite)


def _clients(scene: Scene) -> Iterator[tuple[str, Finding]]:
    waits = [client for client in scene.clients if client.what == "timeout"]
    if waits:
        times = f" ({len(waits)} times)" if len(waits) > 1 else ""
        yield "clients_wait", Finding(f"clients get no answer: {waits[-1].text[:160]}{times}", waits[-1].cite)
    elsewhere = [client for client in scene.clients if client.what == "fallback"]
    if elsewhere:
        yield "fallback", Finding(f"requests went elsewhere: {elsewhere[-1].text[:200]}", elsewhere[-1].cite)
