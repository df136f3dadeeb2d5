"""Findings about the machines: processes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monitors.judge.finding import Finding, all_of
from monitors.judge.ranks import RankView
from monitors.judge.scene import SIMULATED, Gpu, Process, Scene

_HOT_CPU = 90.0


def processes(scene: Scene, ranks: tuple[RankView, ...]) -> Iterator[tuple[str, Finding]]:
    ours = _ours(scene)
    for p in ours:
        if p.state in ("T", "t"):
            views_ = tuple(r for r in ranks if r.stopped)
            yield "stopped", Finding(f"process {p.pid} ({p.title.split(' cfg=')[0]}) is stopped (state {p.state})", p.cite, views_)
    for p in ours:
        if p.state == "D":
            where = f", waiting in {p.wchan}" if p.wchan and p.wchan != "0" else ""
            who = tuple(r for r in ranks if r.process is p)
            yield "uninterruptible", Finding(f"process {p.pid} ({p.title}) is in an uninterruptible sleep (state D){where}", p.cite, who)
    members = [p for p in scene.processes if scene.dialect.member_title.match(p.title)]
    dead = [p for p in members if p.state in ("Z", "X") and p.rank is None]
    if dead:
        yield (
            "member_gone",
            Finding(f"process {dead[0].pid} ({dead[0].title}) has ended and its living parent has not noticed", dead[0].cite),
        )
    titles: dict[str, list[Process]] = {}
    for p in members:
        if p.rank is not None and p.state not in ("Z", "X", "gone"):
            titles.setdefault(f"{p.node} {p.title}", []).append(p)
    for same in titles.values():
        orphans = [p for p in same if p.ppid == 1]
        if len(same) > 1 and orphans and len(orphans) < len(same):
            text = f"process {orphans[0].pid} ({orphans[0].title}) of an earlier start lives on beside its successor, without its parent"
            yield "orphan", Finding(text, orphans[0].cite)
    hot = [p for p in members if (p.cpu_percent or 0) >= _HOT_CPU and p.state not in ("Z", "T")]
    if hot:
        yield "cpu_hot", Finding(f"process {hot[0].pid} ({hot[0].title}) keeps a core at {hot[0].cpu_percent:.0f} %", hot[0].cite)
    gone = [r for r in ranks if r.gone]
    if gone:
        assert gone[0].process is not None
        yield "rank_gone", Finding(f"{', '.join(r.name() for r in gone)}: the process has ended", gone[0].process.cite, tuple(gone))
    alive = [r for r in ranks if r.process and not r.gone]
    if alive and not gone and not dead:
        assert alive[0].process is not None
        yield "ranks_alive", Finding(all_of(len(alive), "rank process", "is alive", "are alive"), alive[0].process.cite)


def _ours(scene: Scene) -> list[Process]:
    """The engine's processes and their children; all of the table where no title is known."""
    known = {p.pid for p in scene.processes if p.rank is not None or scene.dialect.member_title.match(p.title)}
    return [p for p in scene.processes if not known or p.pid in known or p.ppid in known]


def gpus(scene: Scene) -> Iterator[tuple[str, Finding]]:
    found = scene.gpus
    spinning, idle, hot = [g for g in found if g.spinning], [g for g in found if g.idle], [g for g in found if g.hot]
    working = [g for g in found if g.working]

    def say(which: list[Gpu], what: str) -> Finding:
        return Finding(f"{describe(which)}: {what}", which[0].cite)

    if found and len(spinning) == len(found):
        low = "busy by utilisation and far below the power cap" if spinning[0].limit_w else "busy by utilisation at the power of a wait"
        yield "gpus_spin", say(spinning, f"{low}, as a kernel that waits")
    elif hot and idle and len(hot) + len(idle) == len(found) and not working:
        yield "gpus_split", Finding(f"{describe(hot)} while {describe(idle)}", hot[0].cite)
    elif found and len(idle) == len(found):
        yield "gpus_idle", say(idle, "no work on any")
    elif working:
        yield "gpus_work", say(working, "busy at the power of real work")
    elif hot and len(hot) == len(found):
        told = "its power says neither work nor a wait" if hot[0].power_w is not None else "no power reading tells work from a wait"
        yield "gpus_hot", say(hot, f"busy by utilisation; {told}")
    elif found:
        yield "gpus_mixed", say(list(found), "neither idle nor spinning")


def describe(gpus: Sequence[Gpu]) -> str:
    """One phrase for a sentence: ``4 GPUs at 100 % and 95-104 W of 250 W (simulated)``."""
    powers = [g.power_w for g in gpus if g.power_w is not None]
    utils = [g.util for g in gpus if g.util is not None]
    text = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"
    if utils:
        text += f" at {_span(utils)} %"
    if powers:
        limits = [g.limit_w for g in gpus if g.limit_w]
        text += f" and {_span(powers)} W" + (f" of {_span(limits)} W" if limits else "")
    return text + (f" ({SIMULATED})" if any(g.source == SIMULATED for g in gpus) else "")


def _span(values: Sequence[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return str(low) if low == high else f"{low}-{high}"
