"""The always-on loop: look, judge, and on a stall or a crash capture, classify, page. One Watch a deployment.

Everything it does leaves as an event (a plain dictionary) through ``emit``: the command line prints them, the status
page counts them, tests read them. The capture runs beside the loop, so that a server which recovers meanwhile is seen.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monitors import engines, fleet, kept
from monitors.canaries import Canaries
from monitors.capture import bundle
from monitors.capture.manifest import utc
from monitors.captures import Captures
from monitors.judge import alarm, incidents
from monitors.judge.alarm import Due
from monitors.judge.incidents import SERVES, Decision
from monitors.judge.progress import Judgement, Limits, Memory, Sample, State, advance
from monitors.judge.verdict import Class, Verdict
from monitors.lookout import Look, Lookout
from monitors.notes import Notes
from monitors.orders import Orders
from monitors.pager import Pager
from monitors.trail import Trail

Emit = Callable[[dict[str, Any]], None]
_CRASH_BUDGET_S = 30.0
_IN_DOUBT_S = 2.0
_BANDS_KEPT_EVERY_S = 60.0


@dataclass(frozen=True)
class Options:
    """``bundle_root`` replaces the fleet file's place for bundles."""

    limits: Limits = field(default_factory=Limits)
    poll_s: float = 0.5
    state_dir: Path | None = None
    bundle_root: Path | None = None
    native: bool = False


@dataclass(frozen=True)
class _Wanted:
    """A capture that is due; ``key`` is the incident that it is for."""

    reason: str
    budget_s: float
    seen: Mapping[str, Any]
    goes_on: bool
    key: str


class Watch:
    """Watches one deployment. ``turn`` is one look and what follows from it; ``close`` waits for a running capture."""

    def __init__(self, whole: fleet.Fleet, deployment: fleet.Deployment, options: Options, emit: Emit) -> None:
        self.deployment = deployment
        self._fleet = whole
        self._options = options
        self._emit_to = emit
        state_dir = options.state_dir or fleet.state_root() / "monitor"
        self._state_file = state_dir / f"{deployment.name}.json"
        self._bands_file = state_dir / f"{deployment.name}.power.json"
        self._pager = Pager(whole, deployment.name, state_dir, self._emit)
        self._lookout = Lookout(deployment, bands=kept.bands(self._bands_file))
        self._limits = _limits(deployment, options.limits)
        self._memory = Memory()
        self._bands_s = 0.0
        self._canaries = Canaries(deployment, self._emit)
        self._book = incidents.resumed(kept.book(self._state_file), lambda verdict: bool(verdict) and Class(verdict).is_alarm)
        self._captures = Captures(whole, deployment, self._lookout.remotes, self._emit, root=options.bundle_root, native=options.native)
        self._notes = Notes(deployment.boot_deadline_s, self._emit)
        self._orders = Orders(deployment, self._lookout.remotes, self._emit)
        self._trail = Trail()
        self._leaking: frozenset[str] = frozenset()
        self._goes_on = False  # what is captured now is no stall: its end is no end of what was found
        self._for: incidents.Incident | None = None  # whose evidence it is
        self._died = False  # that incident's server has ended since: no silence that ended by itself
        self._next: _Wanted | None = None  # a capture that is due when the one that runs is done
        self._waiting: tuple[Verdict, Path] | None = None  # the last verdict, until it has paged or will not
        self._sample = Sample(0.0, None, None)
        self.status: dict[str, Any] = {"deployment": deployment.name, "state": State.unknown.value}

    def turn(self) -> Judgement:
        """One look. Never raises for what happens to the server or to a node."""
        look = self._lookout.look(quiet_s=self._memory.quiet_s)
        sample, corrupt = self._canaries.turn(look.sample)
        look = replace(look, sample=sample)
        self._memory, judgement = advance(previous := self._memory, look.sample, self._limits)
        self._learn(judgement, look)
        self._leaks(look)
        if corrupt is not None:
            self._corrupt(corrupt)
        self._notes.turn(look, judgement, previous, self._lookout.devices.xids())
        before = self._book
        self._book, decision = incidents.decide(before, judgement, look.sample, time.time(), look.ending.cause)
        if decision is Decision.declare_crash and self._orders.planned(look, look.sample.invocation):
            self._book, decision = before, Decision.none
        self._orders.turn(look, judgement, tell=before.open is None)
        if decision in (Decision.ended, Decision.restarted, Decision.declare_crash) and before.open is not None:
            self._died = self._died or (self._for is not None and before.open.key == self._for.key)
        if decision is not Decision.none:
            self._act(decision, judgement, look)
            self._keep_book()
        elif self._book.starting and self._book.open is None and judgement.state in SERVES:
            self._owe(self._pager.over(self._book, Decision.restarted))
        self._sample = look.sample
        self._finish_capture()
        self._page_when_due()
        self._owe(self._pager.remind(self._pager.again(self._book, look.sample.mono_s), time.time()))
        self._trail.add(look.sample.mono_s, time.time(), judgement.state.value, judgement.held, judgement.quiet_s, look.sample.steps)
        self.status = {
            "trail": self._trail.samples()[-180:],
            "deployment": self.deployment.name, "state": judgement.state.value, "held": judgement.held,
            "quiet_s": round(judgement.quiet_s, 2), "incident": self._book.to_json()["open"], "gaps": list(look.gaps), "looked_utc": utc(),
        }  # fmt: skip
        return judgement

    def close(self, *, deadline_s: float = 120.0) -> None:
        self._captures.wait(deadline_s)
        self._finish_capture()
        self._captures.close(deadline_s)
        self._canaries.close()
        self._lookout.close()

    # What a decision leads to.

    def _act(self, decision: Decision, judgement: Judgement, look: Look) -> None:
        opened = self._book.open
        if decision is Decision.declare_wedge:
            last = utc(time.time() - judgement.quiet_s)
            self._emit("stall_declared", quiet_s=round(judgement.quiet_s, 2), stall_s=round(judgement.stall_s, 2), held=judgement.held,
                       last_progress_utc=last, incident=opened.key if opened else "")  # fmt: skip
            seen = {
                "state": judgement.state.value,
                "stalled_s": round(judgement.quiet_s, 2),
                "held": judgement.held,
                "last_progress_utc": last,
            }
            self._capture("wedge", bundle.budget(self.deployment, judgement.quiet_s), seen)
        elif decision is Decision.declare_crash:
            self._emit("crash_declared", ends=self._book.row, notices=[notice.text for notice in look.notices][:5])
            self._capture("crash", _CRASH_BUDGET_S, {"state": judgement.state.value, "ended": True, "ends": self._book.row})
        else:
            self._emit(decision.value, quiet_s=round(judgement.quiet_s, 2))
            again = decision is Decision.restarted and judgement.state not in SERVES
            self._owe(self._pager.restarting(self._book) if again else self._pager.over(self._book, decision))

    def _capture(self, reason: str, budget_s: float, seen: Mapping[str, Any], *, goes_on: bool = False) -> None:
        """Take the evidence beside the watch. ``goes_on``: of a server that is not stalled, and answers all the while."""
        incident = None if goes_on else self._book.open
        if self._captures.begin(reason, budget_s, progress=seen, suspicion=self._notes.suspicion, trail=self._trail.text()):
            self._goes_on, self._for, self._died = goes_on, incident, False
        else:
            self._next = _Wanted(reason, budget_s, seen, goes_on, incident.key if incident else "")

    def _finish_capture(self) -> None:
        taken, opened = self._captures.finished(), self._book.open
        if taken is None:
            return
        if isinstance(taken, Exception):
            self._owe(self._pager.page(self._book, "hang_unknown", f"The capture failed: {taken}", self._for))
            self._begin_next()
            return
        if opened is not None and self._for is not None and opened.key == self._for.key:
            self._book = replace(self._book, open=replace(opened, bundle=str(taken.folder), verdict=taken.verdict.verdict.value))
        self._waiting = (taken.verdict, taken.folder)
        self._page_when_due()
        self._keep_book()
        self._captures.follow(taken)
        self._begin_next()

    def _begin_next(self) -> None:
        """The capture that had to wait, unless what it was for is over (then there is nothing left to see)."""
        due, self._next = self._next, None
        if due is not None and (due.goes_on or (self._book.open is not None and self._book.open.key == due.key)):
            self._capture(due.reason, due.budget_s, due.seen, goes_on=due.goes_on)

    def _page_when_due(self) -> None:
        """Page for the last verdict when it is time to: at once, when the work still lies after a while, or not at all."""
        if self._waiting is None:
            return
        (verdict, folder), opened = self._waiting, self._book.open
        still_open = opened is not None and opened.bundle == str(folder)
        lies = still_open or self._goes_on or self._died
        quiet_s = math.inf if self._memory.state is State.ended or self._died else self._memory.quiet_s
        found = alarm.due(verdict, lies=lies, quiet_s=quiet_s, source=self._sample.source, limits=self._limits,
                          signs=self._sample.signs)  # fmt: skip
        if found is Due.later:
            return
        self._waiting = None
        if found is Due.now:
            self._owe(self._pager.page(self._book, verdict.verdict.value, _body(self.deployment, verdict, folder), self._for))
            if alarm.acts(verdict, found, still_open=still_open and not self._died):
                self._captures.act()
        elif verdict.verdict.is_alarm:
            self._emit("page", page_sent=None, reason="the silence has ended by itself: it is a record")
        else:
            self._emit("page", page_sent=None, reason=f"{verdict.verdict.value} is recorded and pages nobody")

    def _leaks(self, look: Look) -> None:
        """Slots that leak, and markup in answers: each is told once, with the evidence."""
        leaks = {name: text for name, text in (("slots", look.slots), ("markup", look.markup)) if text}
        fresh = {name: text for name, text in leaks.items() if name not in self._leaking}
        for name, text in fresh.items():
            self._emit("leak_declared", of=name, text=text)
        if fresh:
            self._capture("leak", _CRASH_BUDGET_S, fresh, goes_on=True)
        self._leaking = frozenset(leaks)

    def _corrupt(self, canary: Mapping[str, object]) -> None:
        """Wrong answers under load: what the canary heard goes into the bundle, where the judge finds it."""
        self._emit("corruption_declared", **canary)
        self._capture("corruption", _CRASH_BUDGET_S, {"canary": canary}, goes_on=True)

    def _learn(self, judgement: Judgement, look: Look) -> None:
        """What the GPUs draw now, when now is a quiet moment of one kind of work."""
        quiet = judgement.state in (State.idle, State.busy) and not judgement.changed and judgement.quiet_s < _IN_DOUBT_S
        if not quiet or look.load is None or self._book.open is not None:
            return
        if self._lookout.devices.learn(look.sample.mono_s, look.load) and look.sample.mono_s - self._bands_s >= _BANDS_KEPT_EVERY_S:
            self._bands_s = look.sample.mono_s
            self._keep(self._bands_file, self._lookout.devices.bands.to_json(), "what the GPUs draw is learned anew after a restart")

    def _emit(self, event: str, **fields: Any) -> None:
        self._emit_to({"event": event, "deployment": self.deployment.name, "utc": utc(), "mono_s": round(time.monotonic(), 3), **fields})

    def _owe(self, book: incidents.Book) -> None:
        """The book after the pager has had it: what was paged must be on disk before anything else happens."""
        if book is not self._book:
            self._book = book
            self._keep_book()

    def _keep_book(self) -> None:
        self._keep(self._state_file, self._book.to_json(), "a monitor that is started again may page once more")

    def _keep(self, file: Path, document: Any, otherwise: str) -> None:
        why = kept.write(file, document)
        if why:
            self._emit("error", text=f"{why}; {otherwise}")


def run(whole: fleet.Fleet, deployments: list[fleet.Deployment], options: Options, emit: Emit, stop: threading.Event,
        watches: list[Watch] | None = None) -> None:  # fmt: skip
    """Watch until ``stop`` is set. ``watches`` is filled for a status page to read."""
    made = watches if watches is not None else []
    made.extend(Watch(whole, deployment, options, emit) for deployment in deployments)
    threads = [
        threading.Thread(target=_loop, args=(watch, options.poll_s, emit, stop), name=f"watch-{watch.deployment.name}") for watch in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _loop(watch: Watch, poll_s: float, emit: Emit, stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            started = time.monotonic()
            try:
                watch.turn()
            except Exception as error:  # a fault of ours is told and the watch goes on: a dead monitor helps nobody
                emit({"event": "error", "deployment": watch.deployment.name, "utc": utc(), "text": f"{type(error).__name__}: {error}"})
            stop.wait(max(0.05, poll_s - (time.monotonic() - started)))
    finally:
        watch.close()


def _limits(deployment: fleet.Deployment, asked: Limits) -> Limits:
    """With the deployment's own watchdog time, which bounds every wait."""
    return replace(asked, watchdog_s=deployment.watchdog_s or engines.load(deployment.engine).watchdog_s)


def _body(deployment: fleet.Deployment, verdict: Verdict, folder: Path) -> str:
    lines = [f"{verdict.verdict.value} (confidence {verdict.confidence:.2f}) on {deployment.name}, {os.uname().nodename}"]
    lines += [f"suspect: {suspect}" for suspect in verdict.suspects[:4]]
    lines += [f"- {item.text}" for item in verdict.evidence if item.supports][:6]
    lines += [f"runbook: opsctl runbook show {verdict.verdict.value}", f"bundle: {folder}"]
    return "\n".join(lines)
