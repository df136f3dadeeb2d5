"""A drill from injection to recovery.

::

    steady state -> injected -> detected (a page) -> captured -> [runbook] -> mitigated -> faults lifted -> recovered

The faults are lifted whatever happened, and the lifter does it when this process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opsctl.drill import lifter
from opsctl.drill.playing import Deadlines, Playing, Responder
from opsctl.drill.score import Moments, Score
from opsctl.drill.stage import Stage, moment
from opsctl.playbooks import actions
from opsctl.playbooks.actions import Place
from opsctl.playbooks.journal import utc
from opsctl.playbooks.process import end_in
from opsctl.playbooks.schema import Playbook, Step
from opsctl.rollout.checks import Outcome
from opsctl.staging.waiting import StageError

_LIFT_S = 30.0
_LEARN_S = 60.0
_LEARNED = 2  # answers at rest that were alike
_POLL_S = 0.1
_TRIAGE_S = 60.0


def play(playbook: Playbook, stage: Stage, responder: Responder, talk: Callable[[str], None], *, seed: int | None = None,
         deadlines: Deadlines = Deadlines()) -> Score:  # fmt: skip # noqa: B008 (frozen)
    """Raises StageError when it cannot begin: nothing was injected then."""
    drill = playbook.drill
    assert drill is not None
    score = Score(playbook.name, responder.mode, utc(time.time()).replace("Z", "+00:00"), Moments(),
                  expected=[*drill.verdicts, *drill.also], folder=str(stage.folder))  # fmt: skip
    stage.can_play(drill)
    for one in playbook.hypothesis:
        check = stage.server.check(one)
        if check.outcome is not Outcome.passed:
            raise StageError(f"the steady state does not hold: {check.name} {check.outcome}: {check.evidence}")
    traffic = stage.clients(drill.traffic)
    playing = Playing(playbook, stage, talk, score, traffic, deadlines)
    try:
        try:
            _learn(playing)
            traffic.begin()
            time.sleep(moment(seed))
            playing.look()
            _inject(playing)
            if drill.pages:
                _paged_for(playing, responder)
            else:
                _paged_for_nobody(playing, responder)
            if playing.until(playing.good, deadlines.mitigate_s):
                playing.stamp("mitigated", playing.good())
        finally:
            _lift(playing)
        _recovered(playing)
    finally:
        traffic.end()
    playing.look()
    score.judge(drill)
    return score


def _learn(playing: Playing) -> None:
    """Before any traffic the canary's answer is recorded, where one is asked for."""
    if not playing.drill.canary:
        return

    def learned() -> bool:
        asked = [event for event in playing.stage.watcher.events if event["event"] == "canary" and not event["loaded"]]
        return len([event for event in asked if event["answer"] in ("learning", "same")]) >= _LEARNED

    if not playing.until(learned, _LEARN_S):
        raise StageError(f"the monitor's canary was not answered alike {_LEARNED} times at rest within {_LEARN_S:g} s")


def _inject(playing: Playing) -> None:
    """A change by hand and the method's steps; the injection is the first of them that has begun."""
    drill = playing.drill
    playing.begun, playing.before = time.monotonic(), playing.stage.configuration()
    if drill.by_hand is not None:
        playing.aside(f"{playing.since():6.1f} s  by hand, past every guard: {' '.join(map(str, drill.by_hand.edits()))}")
        playing.stage.change_by_hand(drill.by_hand)
    for step in playing.playbook.method:
        if drill.told_apart and step is not playing.playbook.method[0]:
            _named(playing, step)
        _step(playing, step)


def _named(playing: Playing, following: Step) -> None:
    """Wait until what was injected has a verdict of its own."""
    known = len(playing.score.verdicts)
    wait_s = playing.deadlines.detect_s + playing.deadlines.capture_s
    if not playing.until(lambda: len(playing.score.verdicts) > known, wait_s):
        playing.score.problems.append(f"what came before {following.name} had no name after {wait_s:g} s")


def _step(playing: Playing, step: Step) -> None:
    stage = playing.stage
    place = Place(stage.fleet_path, stage.deployment.name, stage.deployment.api, env=stage.env)
    playing.aside(f"{playing.since():6.1f} s  {step.name}: {actions.told(step, place, playing.playbook.name)}")
    if step.fault:
        try:
            stage.server.arm(step.fault, step.deadline_s)
        except OSError as error:
            raise StageError(f"the fault was not taken: {error}") from error
        playing.traffic.provoke()
        return
    ran = end_in(actions.executable(actions.words(step, place, playing.playbook.name)), step.deadline_s, env=stage.env)
    if step.rollout is not None:
        stage.changed = True
    if ran.code not in step.expects:
        playing.score.problems.append(f"{step.name}: {ran.ending}, expected {' or '.join(map(str, step.expects))}")


def _paged_for(playing: Playing, responder: Responder) -> None:
    moments, deadlines = playing.score.moments, playing.deadlines
    playing.until(lambda: moments.detected is not None, deadlines.detect_s)
    if playing.drill.gateway and playing.drill.verdicts:  # the monitor has nothing to say of a server that is well: whoever is paged looks
        playing.until(lambda: playing.is_named, deadlines.capture_s)
        _captured_by_hand(playing)
    elif playing.drill.verdicts:
        playing.until(lambda: moments.captured is not None and playing.is_named, deadlines.capture_s)
    if playing.drill.told_apart:
        _triaged(playing)
    responder.respond(playing)


def _paged_for_nobody(playing: Playing, responder: Responder) -> None:
    """It is looked at by hand, and nobody may be paged while it lasts."""
    playing.until(lambda: playing.score.paged > 0, playing.drill.watch_s)
    if not playing.drill.verdicts:
        return
    verdict = _captured_by_hand(playing)
    playing.score.verdicts += [verdict] if verdict else []
    responder.respond(playing)


def _captured_by_hand(playing: Playing) -> str:
    """The verdict on what ``opsctl capture`` found."""
    answer = playing.stage.opsctl("capture", "--reason", "drill", deadline_s=playing.deadlines.capture_s)
    if answer["data"] is None:
        playing.score.problems.append(f"nothing could be captured: {answer['errors']}")
        return ""
    playing.stamp("captured")
    return str(answer["data"]["verdict"])


def _triaged(playing: Playing) -> None:
    """What ``opsctl triage`` makes of it while it lasts: each cause is a finding of its own, or the drill has failed."""
    answer = playing.stage.opsctl("triage", deadline_s=_TRIAGE_S)
    playing.score.triage = [fault["verdict"] for fault in (answer["data"] or {}).get("faults", []) if fault["told"]]
    playing.aside(f"{playing.since():6.1f} s  triage tells: {', '.join(playing.score.triage) or 'nothing'}")


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
