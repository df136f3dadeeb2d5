"""Findings about the machines: processes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from monitors.judge.finding import Finding
from monitors.judge.ranks import RankView
from monitors.judge.scene import Gpu, Scene
from monitors.observe.gpu import describe


def processes(scene: Scene, ranks: tuple[RankView, ...]) -> Iterator[tuple[str, Finding]]:
    stopped = [p for p in scene.processes if p.state in ("T", "t")]
    for p in stopped:
        views_ = tuple(r for r in ranks if r.stopped)
        yield "stopped", Finding(f"process {p.pid} ({p.title.split(' cfg=')[0]}) is stopped (state {p.state})", p.cite, views_)
    for p in scene.processes:
        if p.state == "D":
            where = f", waiting in {p.wchan}" if p.wchan and p.wchan != "0" else ""
            yield "uninterruptible", Finding(f"process {p.pid} ({p.title}) is in an uninterruptible sleep (state D){where}", p.cite)
    gone = [r for r in ranks if r.gone]
    if gone:
        assert gone[0].process is not None
        yield "rank_gone", Finding(f"{', '.join(r.name() for r in gone)}: the process has ended", gone[0].process.cite, tuple(gone))
    alive = [r for r in ranks if r.process and not r.gone]
    if alive and not gone:
        assert alive[0].process is not None
        yield "ranks_alive", Finding(f"all {len(alive)} rank processes are alive", alive[0].process.cite)


def gpus(scene: Scene) -> Iterator[tuple[str, Finding]]:
    found = scene.gpus
    spinning, idle = [g for g in found if g.spinning], [g for g in found if g.idle]

    def say(which: list[Gpu], what: str) -> Finding:
        return Finding(f"{describe(which)}: {what}", which[0].cite)

    if found and len(spinning) == len(found):
        yield "gpus_spin", say(spinning, "busy by utilisation and far below the power cap, as a kernel that waits")
    elif spinning and len(spinning) + len(idle) == len(found):
        yield "gpus_split", Finding(f"{describe(spinning)} while {describe(idle)}", spinning[0].cite)
    elif found and len(idle) == len(found):
        yield "gpus_idle", say(idle, "no work on any")
    elif found:
        yield "gpus_work", say(list(found), "at least one is neither idle nor spinning")
