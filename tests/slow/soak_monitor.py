"""``make soak-monitor``: the pure judge over 1,000 generated hours of each dialect, and over 500 wedges of each.

Simulated time through the very functions that the daemon calls. An alarm is a page. Prints the table that is kept in
docs/results/soak-monitor.md; exit 1 for a false alarm or a wedge that was not found.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from monitors.judge.patience import Limits, bound_s
from tests.slow.soak.desk import CAPTURE_S, Desk, Page
from tests.slow.soak.scenes import WEDGES, scene
from tests.slow.soak.traffic import RECORDED, Traffic, server

_SERVER_HOURS = 10.0
DIALECTS = ("lastbatch", "sglang", "vllm", "generic")


@dataclass
class Healthy:
    """``pages`` are false alarms. ``silences``: the longest of each kind that ended by itself."""

    hours: float = 0.0
    looks: int = 0
    stalls: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    pages: list[Page] = field(default_factory=list)
    silences: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Wedge:
    kind: str
    source: str
    declared_s: float | None  # after the last progress; None: not declared
    paged_s: float | None
    verdict: str
    bound_s: float


def healthy(dialect: str, hours: float, seed: int) -> Healthy:
    found = Healthy()
    rng = random.Random(f"{dialect} {seed}")
    while found.hours < hours:
        traffic = Traffic(server(dialect, rng), rng)
        desk = Desk(Limits(), lambda sample, truth, quiet, what=traffic.what: scene(what, truth, sample.held or 1, quiet, rng))  # type: ignore[misc]
        for sample, truth in traffic.hours(min(_SERVER_HOURS, hours - found.hours)):
            desk.turn(sample, truth)
            found.looks += 1
        found.hours += (traffic.now_s - traffic.unwatched_s) / 3600
        found.stalls.update(truth for _, _, truth in desk.declared)
        found.verdicts.update(verdict.value for verdict, _ in desk.records)
        found.pages += desk.pages
        for kind, length in traffic.silences.items():
            found.silences[kind] = max(found.silences.get(kind, 0.0), length)
    return found


def wedges(dialect: str, count: int, seed: int) -> list[Wedge]:
    found = []
    rng = random.Random(f"wedges {dialect} {seed}")
    for number in range(count):
        kind = WEDGES[number % len(WEDGES)]
        what = server(dialect, rng)
        while what.ranks == 1 and kind in ("tp_desync", "asymmetric", "host_callback"):  # these need somebody who waits
            what = server(dialect, rng)
        traffic = Traffic(what, rng)
        desk = Desk(Limits(), lambda sample, truth, quiet, what=what: scene(what, truth, sample.held or 1, quiet, rng))  # type: ignore[misc]
        begun: float | None = None
        before = 0
        for sample, truth in traffic.wedge(kind, 300.0):
            if truth == kind and begun is None:
                begun, before = sample.mono_s, len(desk.declared)
            desk.turn(sample, truth)
            if begun is not None and desk.pages:
                break
        assert begun is not None
        declared = desk.declared[before:]
        page = next((page for page in desk.pages if page.truth == kind), None)
        lag = traffic.what.dialect.metrics.lag_s if not traffic.boxes else 0.0
        found.append(Wedge(kind, traffic.source.value, declared[0][0] - begun if declared else None, page.at_s - begun if page else None,
                           page.verdict.value if page else "", bound_s(Limits(), traffic.source, traffic.interval_s, lag)))  # fmt: skip
    return found


def spread(values: list[float]) -> str:
    values = sorted(values)
    return f"{statistics.median(values):.1f} / {values[int(0.95 * (len(values) - 1))]:.1f} / {values[-1]:.1f}" if values else "-"


def _table(dialect: str, calm: Healthy, hung: list[Wedge]) -> tuple[str, bool]:
    missed = [one for one in hung if one.paged_s is None]
    cells = (dialect, f"{calm.hours:,.0f}", f"{calm.looks:,}", sum(calm.stalls.values()), len(calm.pages), len(hung), len(missed))
    return "| " + " | ".join(map(str, cells)) + " |", not calm.pages and not missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1000.0, help="simulated hours of each dialect")
    parser.add_argument("--wedges", type=int, default=500, help="wedges of each dialect")
    parser.add_argument("--dialect", action="append", choices=DIALECTS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    begun = time.monotonic()
    chosen = tuple(asked.dialect or DIALECTS)
    parts = max(1, int(asked.hours // 50))
    with ProcessPoolExecutor(asked.workers) as pool:
        calm = {name: [pool.submit(healthy, name, asked.hours / parts, asked.seed * 1000 + n) for n in range(parts)] for name in chosen}
        hung = {name: pool.submit(wedges, name, asked.wedges, asked.seed) for name in chosen}
        merged: dict[str, Healthy] = {}
        for name, jobs in calm.items():
            merged[name] = Healthy()
            for job in jobs:
                part, into = job.result(), merged[name]
                into.hours += part.hours
                into.looks += part.looks
                into.stalls += part.stalls
                into.verdicts += part.verdicts
                into.pages += part.pages
                into.silences = {
                    kind: max(into.silences.get(kind, 0), part.silences.get(kind, 0)) for kind in {*into.silences, *part.silences}
                }
        found = {name: job.result() for name, job in hung.items()}
    print("| dialect | hours | looks | stalls declared | false alarms | wedges | not found |\n|---|---|---|---|---|---|---|")
    good = True
    for name in chosen:
        row, fine = _table(name, merged[name], found[name])
        good = good and fine
        print(row)
    print("\nSeconds from the last progress to the declaration, and to the page (median / 95 % / longest):\n")
    print("| dialect | source of progress | wedges | declared | bound printed for it | paged |\n|---|---|---|---|---|---|")
    for name in chosen:
        for source in sorted({one.source for one in found[name]}):
            some = [one for one in found[name] if one.source == source]
            declared = [one.declared_s for one in some if one.declared_s is not None]
            paged = [one.paged_s for one in some if one.paged_s is not None]
            late = max(one.bound_s for one in some)
            print(f"| {name} | {source} | {len(some)} | {spread(declared)} | {late:.1f} | {spread(paged)} |")
    print("\nPages by what was injected:\n\n| injected | " + " | ".join(chosen) + " |\n|---|" + "---|" * len(chosen))
    for kind in WEDGES:
        cells = []
        for name in chosen:
            counted = Counter(one.verdict or "none" for one in found[name] if one.kind == kind)
            cells.append(", ".join(f"{verdict} {count}" for verdict, count in counted.most_common(3)))
        print(f"| {kind} | " + " | ".join(cells) + " |")
    print("\nHealthy hours: longest silence of each kind [s], stalls declared in it, and what was recorded of those\n")
    for name in chosen:
        one = merged[name]
        kinds = ", ".join(f"{kind} {length:.0f} ({one.stalls[kind]})" for kind, length in sorted(one.silences.items()))
        print(f"- {name}: {kinds}. Records: {dict(one.verdicts)}")
        for page in one.pages[:20]:
            print(f"  FALSE ALARM at {page.at_s:.0f} s: {page.verdict.value} after {page.quiet_s:.0f} s of {page.truth}")
    counted = ", ".join(f"{count} {kind}s" for kind, count in RECORDED["counted"].items())
    print(
        f"\nDrawn from {counted} of the real engine ({RECORDED['model']}, {RECORDED['seconds']:.0f} s); a capture takes {CAPTURE_S:.0f} s."
    )
    if real := RECORDED.get("watched"):
        print(f"Real traffic: the monitor watched that engine for {real['seconds']} s: {real['stalls']} stalls, {real['pages']} pages.")
    print(f"{time.monotonic() - begun:.0f} s of wall time; seed {asked.seed}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
