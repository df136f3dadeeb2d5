"""Findings about the machines: processes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monitors.judge.finding import Finding
from monitors.judge.ranks import RankView
from monitors.judge.scene import SIMULATED, Gpu, Scene


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
