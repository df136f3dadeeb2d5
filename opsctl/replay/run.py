"""Plays a day's steps one after another, each under its deadline, and keeps what each showed.

A step that does not show what it should is told and the day goes on: from a server that serves, and without the steps that
need the one that failed. Whatever happens, the nodes are taken down.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from engine import blackbox
from monitors.capture.manifest import BundleError
from monitors.remote import NodeError
from opsctl.replay import facts, judge
from opsctl.replay.document import Day, Step
from opsctl.replay.judge import Outcome
from opsctl.replay.pair import DEPLOYMENT, Serving, pair
from opsctl.replay.plays import PLAYS
from opsctl.replay.stage import Stage, callers_toml
from opsctl.staging.gateway import Gateway
from opsctl.staging.waiting import StageError

_BOOT_S = 240.0
_BROKEN = (StageError, NodeError, BundleError, blackbox.BoxError, httpx.HTTPError, OSError)  # of the stage, no finding of a step


class Played(msgspec.Struct, frozen=True):
    """``model``: empty for the default one."""

    day: str
    outcomes: tuple[Outcome, ...]
    whole: facts.Whole
    folder: str
    model: str

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.good)


def replay(day: Day, chosen: Sequence[Step], env: Mapping[str, str], folder: Path, talk: Callable[[str], None], model: str = "") -> Played:
    """Raises StageError when no server could be had to begin with."""
    begun = time.monotonic()

    def say(text: str) -> None:
        talk(f"[{time.monotonic() - begun:6.1f} s] {text}")

    gateway_of: list[Gateway] = []
    serving = Serving(day.server, day.watchdog_s, day.stable_s, model=model)
    outcomes: list[Outcome] = []
    measured: dict[str, msgspec.Struct] = {}
    restarts: list[float] = []
    try:
        say(f"booting two systemd nodes, 3 ranks of the engine on them; logs: {folder}/log")
        with pair(serving, env, folder, lambda title: say(f"PAGE: {title}")) as nodes:
            gateway_of.append(Gateway(nodes.url))
            nodes.add_to_fleet(callers_toml(day.callers, gateway_of[0].url))
            stage = Stage(nodes, day, gateway_of[0], say, restarts)
            stage.boot(_BOOT_S)
            try:
                for step in chosen:
                    outcomes.append(one(stage, step, outcomes, measured))
                    with (folder / "steps.jsonl").open("ab") as kept:  # a replay that is interrupted has shown so much
                        kept.write(msgspec.json.encode(outcomes[-1]) + b"\n")
            finally:
                stage.release()
    except (OSError, subprocess.SubprocessError, NodeError) as error:
        raise StageError(f"{DEPLOYMENT}: {type(error).__name__}: {_said(error)}") from error
    finally:
        for gateway in gateway_of:
            gateway.close()
    seconds = time.monotonic() - begun
    return Played(day.name, tuple(outcomes), facts.whole(measured, restarts, seconds), str(folder), model)


def one(stage: Stage, step: Step, before: Sequence[Outcome], measured: dict[str, msgspec.Struct]) -> Outcome:
    """One step. ``before``: how those went that were played; what it measures is added to ``measured``."""
    good = {outcome.step for outcome in before if outcome.good}
    lacking = [need for need in step.needs if need not in good]
    if lacking:
        stage.talk(f"{step.name}: not played: {', '.join(lacking)} did not show what it should")
        return Outcome(step.name, step.says, 0.0, {}, skipped=f"needs {', '.join(lacking)}, which did not show what it should")
    began = time.monotonic()
    until = began + step.deadline_s

    def left() -> float:
        return max(1.0, until - time.monotonic())

    stage.talk(f"{step.name}: {step.says}")
    try:
        if step.capture is None:  # a capture is of the wedge that the step before it left
            stage.release()
            stage.serve(left)
        found = PLAYS[step.kind](stage, step, left)
    except _BROKEN as error:
        stage.serving = False
        told = f"could not be played: {_said(error)}"
        stage.talk(f"{step.name}: {told}")
        return Outcome(step.name, step.says, round(time.monotonic() - began, 1), {}, (told,))
    measured[step.name] = found
    values = msgspec.to_builtins(found)
    wrong = judge.problems(step.holds, values)
    took = time.monotonic() - began
    if took > step.deadline_s:
        wrong = (*wrong, f"it took {took:.0f} s, and had {step.deadline_s:g} s")
    stage.talk(f"{step.name}: {'as it must' if not wrong else 'NOT AS IT MUST: ' + '; '.join(wrong)} ({took:.0f} s)")
    return Outcome(step.name, step.says, round(took, 1), values, wrong)


def _said(error: Exception) -> str:
    """In one line; of a command that failed, what it said."""
    said = getattr(error, "stderr", None) or str(error)
    return " ".join((said.decode(errors="replace") if isinstance(said, bytes) else str(said)).split())[-600:]
