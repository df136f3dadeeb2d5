"""A drill from injection to recovery. Every moment is a stamp of one monotonic clock, read off what really happened.

::

    steady state -> injected -> detected (a page) -> captured -> [runbook] -> mitigated -> faults lifted -> recovered

The faults are lifted whatever happened, and the lifter does it when this process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from monitors.exit_codes import ExitCode
from opsctl.drill import lifter
from opsctl.drill.score import Moments, Score
from opsctl.drill.stage import Stage, Traffic, moment
from opsctl.playbooks import actions
from opsctl.playbooks.actions import Place
from opsctl.playbooks.journal import utc
from opsctl.playbooks.process import end_in
from opsctl.playbooks.schema import Drill, Playbook
from opsctl.rollout.checks import Outcome
from opsctl.runbooks.run import RunRecord
from opsctl.staging.waiting import StageError, wait_for

_DETECT_S = 60.0  # beyond any target: then nobody was paged
_CAPTURE_S = 90.0
_MITIGATE_S = 120.0
_RECOVER_S = 120.0
_LIFT_S = 30.0
_RUNBOOK_S = 900.0
_POLL_S = 0.1


class Responder(Protocol):
    """Who acts on a page: the runbook by itself, or a person."""

    @property
    def mode(self) -> str: ...

    def respond(self, playing: Playing) -> None:
        """Do what restores service; fill in the score's steps and false moves."""
        ...


@dataclass
class Playing:
    """One drill under way."""

    playbook: Playbook
    stage: Stage
    talk: Callable[[str], None]
    score: Score
    traffic: Traffic
    deadlines: Deadlines
    begun: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def drill(self) -> Drill:
        assert self.playbook.drill is not None
        return self.playbook.drill

    def since(self) -> float:
        """Seconds after the injection."""
        return round(time.monotonic() - self.begun, 2)

    def stamp(self, name: str, at: float | None = None) -> None:
        """Note a moment, once. ``at``: a monotonic second; now where none is given."""
        if getattr(self.score.moments, name) is None:
            setattr(self.score.moments, name, self.since() if at is None else round(at - self.begun, 2))
            self.talk(f"{getattr(self.score.moments, name):6.1f} s  {name}")

    def look(self) -> None:
        """Take in what the monitor said and who was paged."""
        for event in self.stage.watcher.news():
            self.events.append(event)
            if event["event"] == "error":
                self.talk(f"        the monitor says: {event.get('text', 'an error')}")
            if event.get("mono_s", 0.0) < self.begun:  # not every event tells its moment
                continue
            if event["event"] == "captured":
                self.stamp("captured", event["mono_s"])
            elif event["event"] == "verdict" and not self.score.verdict:
                self.score.verdict = event["verdict"]
                self.talk(f"        verdict: {event['verdict']} (confidence {event['confidence']:.2f})")
            elif event["event"] == "page" and event.get("page_sent") and not self.stage.own:
                self._paged(event["mono_s"], str(event.get("title", "page")))
        while self.stage.pages:
            self._paged(*self.stage.pages.pop(0))

    def _paged(self, at: float, title: str) -> None:
        if at < self.begun:
            self.score.false_moves.append(f"a page before anything was injected: {title}")
            return
        if title.startswith(("over:", "restarting:")):
            self.talk(f"        told: {title}")
            return
        self.score.paged += 1
        self.stamp("detected", at)
        self.talk(f"        PAGE: {title}")

    @property
    def bundle(self) -> str:
        return next((str(event["bundle"]) for event in reversed(self.events) if event["event"] == "captured"), "")

    def until(self, condition: Callable[[], Any], deadline_s: float) -> bool:
        """Look on until it holds. False when it does not in time."""

        def held() -> bool:
            self.look()
            return bool(condition())

        try:
            return bool(wait_for(held, deadline_s, "", poll_s=_POLL_S))
        except StageError:
            return False


@dataclass(frozen=True)
class Deadlines:
    """How long each moment is waited for, in seconds."""

    detect_s: float = _DETECT_S
    capture_s: float = _CAPTURE_S
    mitigate_s: float = _MITIGATE_S
    recover_s: float = _RECOVER_S


def play(playbook: Playbook, stage: Stage, responder: Responder, talk: Callable[[str], None], *, seed: int | None = None,
         deadlines: Deadlines = Deadlines()) -> Score:  # fmt: skip
    """Raises StageError when it cannot begin: nothing was injected then."""
    drill = playbook.drill
    assert drill is not None
    score = Score(playbook.name, responder.mode, utc(time.time()).replace("Z", "+00:00"), Moments(), expected=list(drill.verdicts),
                  folder=str(stage.folder))  # fmt: skip
    for one in playbook.hypothesis:
        check = stage.server.check(one)
        if check.outcome is not Outcome.passed:
            raise StageError(f"the steady state does not hold: {check.name} {check.outcome}: {check.evidence}")
    traffic = Traffic(stage.deployment.api, drill.traffic)
    playing = Playing(playbook, stage, talk, score, traffic, deadlines)
    with lifter.guarded(stage.fleet_path, stage.deployment.name, "end" if stage.own else "lift", stage.env, stage.watcher.process.pid):
        try:
            try:
                traffic.begin()
                time.sleep(moment(seed))
                playing.look()
                _inject(playing)
                if drill.pages:
                    _paged_for(playing, responder)
                else:
                    _paged_for_nobody(playing)
                _mitigated(playing)
            finally:
                _lift(playing)
            _recovered(playing)
        finally:
            traffic.end()
    playing.look()
    score.judge(drill)
    return score


def _inject(playing: Playing) -> None:
    """The method's steps; the injection is the first of them that has begun."""
    place = Place(playing.stage.fleet_path, playing.stage.deployment.name, playing.stage.deployment.api, env=playing.stage.env)
    playing.begun = time.monotonic()
    for step in playing.playbook.method:
        playing.talk(f"{playing.since():6.1f} s  {step.name}: {actions.told(step, place, playing.playbook.name)}")
        if step.fault:
            try:
                playing.stage.server.arm(step.fault, step.deadline_s)
            except OSError as error:
                raise StageError(f"the fault was not taken: {error}") from error
            playing.traffic.provoke()
            continue
        ran = end_in(actions.executable(actions.words(step, place, playing.playbook.name)), step.deadline_s, env=playing.stage.env)
        if step.rollout is not None:
            playing.stage.changed = True
        if ran.code not in step.expects:
            playing.score.problems.append(f"{step.name}: {ran.ending}, expected {' or '.join(map(str, step.expects))}")


def _paged_for(playing: Playing, responder: Responder) -> None:
    moments, deadlines = playing.score.moments, playing.deadlines
    playing.until(lambda: moments.detected is not None, deadlines.detect_s)
    if playing.drill.verdicts:
        playing.until(lambda: moments.captured is not None and playing.score.verdict, deadlines.capture_s)
    responder.respond(playing)


def _paged_for_nobody(playing: Playing) -> None:
    """It is looked at by hand, and nobody may be paged while it lasts."""
    playing.until(lambda: playing.score.paged > 0, playing.drill.watch_s)
    if not playing.drill.verdicts:
        return
    answer = playing.stage.opsctl("capture", "--reason", "drill", deadline_s=_CAPTURE_S)
    playing.score.verdict = (answer["data"] or {}).get("verdict", "")
    playing.stamp("captured")


def _mitigated(playing: Playing) -> None:
    """A completion that came after the fault was seen, by whatever path."""
    seen = playing.begun + (playing.score.moments.detected or playing.score.moments.captured or 0.0)
    if playing.until(lambda: playing.traffic.good_after(seen), playing.deadlines.mitigate_s):
        playing.stamp("mitigated", playing.traffic.good_after(seen))


def _lift(playing: Playing) -> None:
    why = lifter.lift(playing.stage.fleet_path, playing.stage.deployment.name, playing.stage.env, _LIFT_S)
    if why:
        playing.score.problems.append(f"the faults could not be lifted: {why}")
        playing.stage.changed = True


def _recovered(playing: Playing) -> None:
    """The beginning of a time in which the steady state held, and the clients got answers, throughout."""
    until = time.monotonic() + playing.deadlines.recover_s
    steady_since, turns = None, 0
    while time.monotonic() < until:
        playing.look()
        now = time.monotonic()
        if all(playing.stage.server.check(one).outcome is Outcome.passed for one in playing.playbook.expected):
            if steady_since is None:
                steady_since, turns = now, playing.traffic.completed
            elif now - steady_since >= playing.drill.steady_s and playing.traffic.completed > turns:
                playing.stamp("recovered", steady_since)
                return
        else:
            steady_since = None
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Auto:
    """The runbook's own steps, one after another, by ``opsctl runbook run``."""

    mode: str = "auto"

    def respond(self, playing: Playing) -> None:
        drill = playing.drill
        if not drill.runbook:
            return
        words = ["runbook", "run", drill.runbook, "--yes"]
        words += ["--bundle", playing.bundle] if playing.bundle else []
        for name, value in drill.values.items():
            words += ["--with", f"{name}={playing.stage.stopped_pid() if value == 'stopped' else value}"]
        words += [word for kind in drill.approve for word in ("--approve", kind)]
        words += [word for name in drill.skip for word in ("--skip", name)]
        playing.talk(f"{playing.since():6.1f} s  opsctl {' '.join(words)}")
        before = playing.score.moments.captured
        answer = playing.stage.opsctl(*words, deadline_s=_RUNBOOK_S)
        if answer["data"] is None:
            raise StageError(f"the runbook did not run: {answer['errors']}")
        record = msgspec.convert(answer["data"], RunRecord)
        note(playing, record)
        if before is None:
            playing.score.false_moves.append("the runbook was begun before the evidence was taken")
        if answer["exit_code"] != ExitCode.DONE:
            playing.score.problems.append(f"the runbook ended with exit code {answer['exit_code']}: {answer['errors'][0]['message']}")


def note(playing: Playing, record: RunRecord) -> None:
    """What the run of a runbook was worth."""
    score = playing.score
    score.fidelity = record.fidelity
    score.steps += [f"{step.name}: {step.outcome} {step.seconds:.1f} s" for step in record.steps]
    score.false_moves += [f"{step.name}: {step.why}" for step in record.steps if step.outcome == "failed"]
    if any("rollout apply" in step.command and step.outcome == "passed" for step in record.steps):
        playing.stage.changed = True
    for step in record.steps:
        playing.talk(f"        {step.name}: {step.outcome} ({step.seconds:.1f} s){f' {step.why}' if step.why else ''}")
