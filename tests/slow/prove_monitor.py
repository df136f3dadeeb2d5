"""``make prove-monitor``: every fault of the engine on two real systemd nodes, watched over ssh, captured and classified.

A row is one fault: the unit is started on both nodes, the monitor runs on the operator's side with the times that it
comes with, the fault is armed and met, and what the monitor says is held against the class that it must find. A row
keeps its result in ``build/prove-monitor``; a run goes on where the last one ended, ``--again`` begins anew. The table is
kept in docs/results/prove-monitor.md. Exit 1 when a row fails, 2 where nodes cannot be booted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from monitors import casefolder
from monitors.capture import bundle
from tests.e2e import nodes
from tests.e2e.serving import wait_for
from tests.e2e.test_monitor_on_engine import Monitor
from tests.e2e.twonodes import CONSTRAINED, HOMES, Group

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build/prove-monitor"
TABLE = ROOT / "docs/results/prove-monitor.md"
QUIET = frozenset({"stall_declared", "crash_declared", "corruption_declared", "captured", "verdict", "page"})
LONG = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 60}
BOOT_DEADLINE_S = 20.0
ARM = "import sys, urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:30000/admin/faults', sys.argv[1].encode(), " \
      "{'Content-Type': 'application/json'}), timeout=10).read()"  # fmt: skip


@dataclass(frozen=True)
class Result:
    """``declared_s``: from the last progress to the declaration, by the monitor's own word. ``ranks``: whose black box
    was captured, ``stacks``: whose stack. ``paged_s``: from the declaration."""

    passed: bool
    verdict: str
    declared_s: float | None = None
    paged_s: float | None = None
    ranks: tuple[int, ...] = ()
    stacks: tuple[int, ...] = ()
    note: str = ""
    why: str = ""


@dataclass(frozen=True)
class Row:
    """``fault``: armed through /admin/faults, or, with ``boot``, given at the start. ``classes``: what must be found; empty:
    nothing may be raised."""

    name: str
    fault: str
    classes: tuple[str, ...]
    play: Callable[[Row, Group, Monitor], Result]
    boot: bool = False
    keys: str = ""


def arm(group: Group, spec: str) -> None:
    done = group.nodes[0].run([sys.executable, "-c", ARM, json.dumps({"fault": spec})])
    assert done.code == 0, done.err


def meet(row: Row, group: Group) -> None:
    """Arm the fault and send what meets it."""
    arm(group, row.fault)
    group.ask(LONG, 90)
    if row.fault.startswith("grammar"):
        wait_for(lambda: group.box(0).host.running > 0, 20, "the first request to run")
        group.ask(CONSTRAINED, 90)


def wedge(row: Row, group: Group, monitor: Monitor) -> Result:
    group.complete()
    seen(monitor, 1.0)
    assert not said(monitor) & QUIET, f"before the fault: {monitor.events}"
    meet(row, group)
    return judged(row, monitor, "stall_declared")


def crash(row: Row, group: Group, monitor: Monitor) -> Result:
    group.complete()
    monitor.wait("state", 30)
    meet(row, group)
    return judged(row, monitor, "crash_declared")


def crash_loop(row: Row, _group: Group, monitor: Monitor) -> Result:
    """The unit dies at each start and systemd starts it again; the class is told once it is a loop."""

    def looped() -> list[dict[str, Any]]:
        seen(monitor, 0.3)
        return [e for e in monitor.events if e["event"] == "verdict" and e["verdict"] == "crash_loop"]

    (found, *_) = wait_for(looped, 150, f"the verdict crash_loop; so far {[e for e in monitor.events if e['event'] == 'verdict']}")
    pages = wait_for(lambda: seen(monitor, 0.3) or [e for e in monitor.events if e.get("page_sent")], 30, "a page")
    return described(row, found["bundle"], None, None, f"{len(pages)} pages for {len(monitor.events)} events")


def out_of_memory(row: Row, group: Group, monitor: Monitor) -> Result:
    group.complete()
    monitor.wait("state", 30)
    meet(row, group)
    return judged(row, monitor, "crash_declared")


def boot_hang(row: Row, group: Group, monitor: Monitor) -> Result:
    overdue = monitor.wait("boot_overdue", 90)
    assert not said(monitor) & QUIET, monitor.events
    code, answer, err = group.opsctl("capture", deadline_s=90)
    assert code in (0, 9), err
    folder = answer["data"]["bundle"]
    return described(row, folder, None, None, f"overdue told after {overdue['loading_s']:.0f} s of loading; captured on demand")


def nothing(row: Row, group: Group, monitor: Monitor) -> Result:
    """Nothing is declared or paged; a capture on demand says what there is."""
    group.complete()
    monitor.wait("state", 30)
    arm(group, row.fault)
    answers = [group.ask(SHORT, 90) for _ in range(2)]
    wait_for(lambda: group.box(0).host.running > 0, 20, "a request to run")
    code, answer, err = group.opsctl("capture", deadline_s=90)
    assert code == 0, err
    assert all(one.result(95).status_code == 200 for one in answers)
    seen(monitor, 6.0)
    assert not said(monitor) & QUIET, monitor.events
    return described(row, answer["data"]["bundle"], None, None, "nothing declared, nobody paged; captured on demand")


def lie_beside_a_wedge(row: Row, group: Group, monitor: Monitor) -> Result:
    group.complete()
    monitor.wait("state", 30)
    arm(group, "health.lie")
    meet(row, group)
    found = judged(row, monitor, "stall_declared")
    assert group.get("/health").status_code == 200, "the health route does not lie: the row proves nothing"
    return found


def corruption(row: Row, group: Group, monitor: Monitor) -> Result:
    group.complete()

    def answers(word: str) -> int:
        seen(monitor, 0.2)
        return sum(1 for e in monitor.events if e["event"] == "canary" and e["answer"] == word)

    wait_for(lambda: answers("learning") >= 2, 40, "the canary's answer to be recorded at rest")
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                group.ask(SHORT, 60).result(70)

    busy = [threading.Thread(target=load) for _ in range(2)]
    for one in busy:
        one.start()
    try:
        wait_for(lambda: answers("same") >= 2, 60, "right answers under load")
        assert not said(monitor) & QUIET, monitor.events
        arm(group, row.fault)
        return judged(row, monitor, "corruption_declared")
    finally:
        stop.set()
        for one in busy:
            one.join(80)


def partition(row: Row, group: Group, monitor: Monitor) -> Result:
    """Node b is cut off while it is captured: its boxes may be in the bundle, what comes later is a named gap."""
    group.complete()
    monitor.wait("state", 30)
    meet(row, group)
    with group.cut_off_in_capture(group.folder / "bundles"):
        monitor.wait("captured", 90)
    found = judged(row, monitor, "stall_declared", stacks=False)
    (folder,) = sorted((group.folder / "bundles").glob("*wedge"))[-1:]
    gaps = [item for item in bundle.load(folder)["items"] if item["node"] == "b" and item["outcome"] != "taken"]
    assert gaps and any("not reached" in gap["reason"] or "unreachable" in gap["reason"] for gap in gaps), gaps
    taken = {item["probe"] for item in bundle.load(folder)["items"] if item["node"] == "a" and item["outcome"] == "taken"}
    assert {"stacks", "log"} <= taken, "node a was not captured to the end"
    took = monitor.wait("captured", 1)["seconds"]
    note = f"cut off in the middle: {len(gaps)} gaps name node b, first: {gaps[0]['probe']}; the capture took {took:.0f} s"
    return dataclasses.replace(found, note=note)


# What is read off the monitor.


def seen(monitor: Monitor, seconds: float) -> None:
    """Let events come in for a while: what must not come is looked for so."""
    with contextlib.suppress(AssertionError):
        monitor.wait("no such event", seconds)


def said(monitor: Monitor) -> set[str]:
    return {event["event"] for event in monitor.events}


def judged(row: Row, monitor: Monitor, declaration: str, *, stacks: bool = True) -> Result:
    declared = monitor.wait(declaration, 60)
    verdict = monitor.wait("verdict", 90)
    page = monitor.wait("page", 60)
    assert page["page_sent"] is True, page
    found = described(row, verdict["bundle"], declared.get("quiet_s"), page["mono_s"] - declared["mono_s"], "", verdict)
    missing = {rank for rank, _ in HOMES} - set(found.ranks)
    if missing or (stacks and declaration == "stall_declared" and len(found.stacks) < 2):
        return dataclasses.replace(found, passed=False, why=f"not captured: boxes of {sorted(missing)}, stacks only of {found.stacks}")
    return found


def described(row: Row, folder: str, declared_s: float | None, paged_s: float | None, note: str,
              verdict: dict[str, Any] | None = None) -> Result:  # fmt: skip
    """From the bundle: it must be whole, judge again to the same class, and name no fault."""
    where = Path(folder)
    checked = bundle.verify(where)
    manifest = bundle.load(where)
    taken = [item for item in manifest["items"] if item["outcome"] == "taken"]
    again = casefolder.judge(where).verdict.value
    name = str(verdict["verdict"]) if verdict else again
    words = json.dumps(verdict or {}) + "".join(path.read_text(errors="replace") for path in where.glob("*.jsonl"))
    why = ""
    if not checked.ok:
        why = f"the bundle is not valid: {checked.problems}"
    elif again != name:
        why = f"a replay of the bundle says {again}"
    elif name not in row.classes:
        why = f"{name} is none of {', '.join(row.classes)}"
    elif not row.boot and row.fault.split(":")[0] in words:  # a boot's fault stands on its command line
        why = "the fault is named in the evidence: the verdict proves nothing"
    ranks = tuple(sorted({item["rank"] for item in taken if item["probe"] == "black_box"}))
    stacks = tuple(sorted({item["rank"] for item in taken if item["probe"] == "stacks" and item["rank"] is not None}))
    return Result(not why, name, declared_s, paged_s and round(paged_s, 1), ranks, stacks, note, why)


CANARY = "[deployment.tiny.canary]\nload_every_s = 0.5\n"
ROWS = (
    Row("grammar.verify_desync", "grammar.verify_desync", ("hang_grammar_barrier",), wedge),
    Row("collective.mismatch", "collective.mismatch:rank=2,after_steps=5", ("hang_symmetric_spin",), wedge),
    Row("collective.skip", "collective.skip:rank=2,after_steps=5", ("hang_tp_desync",), wedge),
    Row("callback.stall", "callback.stall:rank=2", ("hang_host_callback", "hang_asymmetric"), wedge),
    Row("callback.stall, lock held", "callback.stall:rank=2,hold_gil=true", ("hang_host_callback", "hang_asymmetric"), wedge),
    Row("progress.none", "progress.none:after_steps=5", ("hang_control_plane",), wedge),
    Row("cpu.spin", "cpu.spin:rank=0", ("hang_cpu_bound",), wedge),
    Row("process.stop", "process.stop:rank=2", ("hang_stopped",), wedge),
    Row("decode.crash", "decode.crash", ("crash",), crash),
    Row("decode.crash at each start", "decode.crash:n=1", ("crash_loop",), crash_loop, boot=True),
    Row("boot.hang", "boot.hang", ("loading_not_hung",), boot_hang, boot=True, keys=f"boot_deadline_s = {BOOT_DEADLINE_S}\n"),
    Row("decode.slow", "decode.slow:factor=20", ("slow_not_hung", "healthy"), nothing),
    Row("health.lie", "health.lie", ("healthy", "idle_not_hung"), nothing),
    Row("health.lie beside progress.none", "progress.none:after_steps=5", ("hang_control_plane",), lie_beside_a_wedge),
    Row("output.corrupt", "output.corrupt:rate=0.5,min_running=2", ("health_lies",), corruption, keys=CANARY),
    Row("memory.exhaust", "memory.exhaust", ("oom",), out_of_memory),
    Row("collective.skip, node b cut off in the capture", "collective.skip:rank=2,after_steps=5",
        ("hang_tp_desync", "hang_symmetric_spin", "hang_asymmetric", "hang_unknown"), partition),
)  # fmt: skip


def prove(row: Row, group: Group) -> Result:
    """One row from a fresh start of the unit to its end."""
    group.configure(("--fault", row.fault) if row.boot else (), row.keys)
    group.pages_file.write_text("")
    for name in ("state", "bundles"):
        group.forget(name)
    began = time.monotonic()
    monitor: Monitor | None = None
    try:
        with group.watching() as monitor:
            group.start(wait=not row.boot)
            monitor.wait("state", 60)
            result = row.play(row, group, monitor)
    except (AssertionError, httpx.HTTPError, OSError) as error:
        result = Result(False, "-", why=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
        events = "\n".join(map(json.dumps, monitor.events)) if monitor else "no monitor"
        kept(row).with_suffix(".log").write_text(f"{error}\n{group.journals()}\n{events}\n")
    finally:
        group.end()
    mark, took = "ok  " if result.passed else "FAIL", time.monotonic() - began
    print(f"{mark} {row.name:<48} {result.verdict:<22} {took:5.0f} s  {result.why}", flush=True)
    return result


def table(found: dict[str, Result]) -> str:
    lines = ["| fault | verdict | declared after [s] | paged after the declaration [s] | boxes of ranks | stacks of ranks | |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in ROWS:
        one = found.get(row.name)
        if one is None:
            lines.append(f"| {row.name} | not run | | | | | |")
            continue
        cells = [row.name, one.verdict if one.passed else f"**FAILED** {one.verdict}", _figure(one.declared_s), _figure(one.paged_s),
                 ", ".join(map(str, one.ranks)), ", ".join(map(str, one.stacks)), one.why or one.note]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def kept(row: Row) -> Path:
    return KEPT / ("".join(c if c.isalnum() else "-" for c in row.name) + ".json")


def load(row: Row) -> Result | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        raw = json.loads(kept(row).read_text())
        return Result(**{**raw, "ranks": tuple(raw["ranks"]), "stacks": tuple(raw["stacks"])})
    return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="run every row, whatever is kept")
    parser.add_argument("--row", action="append", help="only this one (repeatable)")
    parser.add_argument("--for-s", type=float, default=7200.0, help="begin no row after so long [s]")
    asked = parser.parse_args(argv)
    why = nodes.missing(ssh=True)
    if why:
        print(why, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nodes and namespaces go with this process
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in ROWS if not asked.row or row.name in asked.row]
    due = [row for row in chosen if asked.again or asked.row or (old := load(row)) is None or not old.passed]
    began = time.monotonic()
    if due:
        with tempfile.TemporaryDirectory(prefix="prove-monitor-") as folder, contextlib.ExitStack() as undo:
            group = Group(Path(folder), undo)
            for row in due:
                if time.monotonic() - began > asked.for_s:
                    break
                kept(row).write_text(json.dumps(dataclasses.asdict(prove(row, group))))
    found = {row.name: one for row in ROWS if (one := load(row)) is not None}
    print(table(found))
    return 0 if all((one := found.get(row.name)) is not None and one.passed for row in chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
