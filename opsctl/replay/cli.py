"""``opsctl drill run`` of a day: what is asked for, whether it can be played here, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session
from opsctl.drill import history
from opsctl.drill.score import Moments, Score
from opsctl.playbooks.journal import utc
from opsctl.replay import document, judge
from opsctl.replay.document import Day, DayError
from opsctl.replay.run import Played, replay
from opsctl.staging import nodes
from opsctl.staging.waiting import StageError


def known() -> list[dict[str, Any]]:
    """The days that ship, as ``drill list`` tells them."""
    found = [document.read(path) for path in document.days().values()]
    return [{"name": day.name, "summary": day.summary, "verdicts": [], "also": [], "runbook": "", "server": list(day.server),
             "injects": [step.name for step in day.steps]} for day in found]  # fmt: skip


def every_days() -> dict[str, int]:
    """How often each day is to be played again."""
    return {name: document.read(path).every_days for name, path in document.days().items()}


def play(session: Session, names: Sequence[str], only: Sequence[str], model: str, *, alone: bool, as_json: bool) -> bool:
    """Replay the day that is among the names; False when there is none. ``alone``: nothing else is asked for that a day has not.
    Raises BadParameter."""
    days = [name for name in names if name in document.days()]
    if not days:
        if only:
            raise typer.BadParameter(f"--only: of a day that is replayed; there are {', '.join(document.days())}")
        return False
    if len(names) > 1 or not alone:
        raise typer.BadParameter(f"{days[0]} is a whole day on nodes of its own: name it alone, without --all, --attended or --fleet")
    run(session, days[0], only, model, as_json=as_json)
    return True


def run(session: Session, name: str, only: Sequence[str], model: str, *, as_json: bool) -> None:
    """Exit status: 0 every step showed what it should, 1 it could not be played, 2 refused, 9 a step did not. A whole day is
    kept among the drills that were played."""
    began = time.time()
    try:
        day = document.read(document.days()[name])
        chosen = day.chosen(only)
    except DayError as error:
        raise typer.BadParameter(str(error)) from error
    if why := nodes.missing(ssh=True):
        remedy = "run it as root on a machine with systemd, openssh and iproute2 (`make node-packages` installs what is missing)"
        session.show(Answer("drill run", exit_code=ExitCode.USAGE, errors=(Problem("needs", why, name, remedy),)), as_json=as_json)
        return
    folder = fleet.state_root(session.env) / "replays" / time.strftime(f"{name}-%Y%m%dT%H%M%SZ", time.gmtime())
    try:
        played = replay(day, chosen, session.env, folder, session.talk, str(Path(model).absolute()) if model else "")
    except StageError as error:
        problem = Problem("stage", str(error), name, f"logs: {folder}/log")
        session.show(Answer("drill run", exit_code=ExitCode.INTERNAL, errors=(problem,)), as_json=as_json)
        return
    text = told(day, played)
    if not only:
        history.add(history.path_of(session.env), scored(played, began))
    (folder / "replay.json").write_bytes(msgspec.json.format(msgspec.json.encode(played), indent=1) + b"\n")
    (folder / "replay.md").write_text(f"{text}\n", encoding="utf-8")
    problems = tuple(Problem("failed", "; ".join(one.problems) or one.skipped, one.step) for one in played.failed)
    code = ExitCode.FOUND if problems else ExitCode.DONE
    session.show(Answer("drill run", msgspec.to_builtins(played), text, code, problems), as_json=as_json)


def scored(played: Played, began: float) -> Score:
    """A day has no moments of its own: it is as good as its steps. ``began``: Unix time."""
    problems = [f"{one.step}: {'; '.join(one.problems) or one.skipped}" for one in played.failed]
    return Score(played.day, "auto", utc(began).replace("Z", "+00:00"), Moments(), problems=problems, points=0 if problems else 100,
                 passed=not problems, folder=played.folder)  # fmt: skip


def told(day: Day, played: Played) -> str:
    bad = len(played.failed)
    sentence = f"{len(played.outcomes)} steps, {bad} not as they must be" if bad else f"{len(played.outcomes)} steps, each as it must be"
    return (
        f"{judge.steps(played.outcomes)}\n\n{judge.table(day, played.outcomes, played.whole)}\n\n"
        f"{sentence}; {played.whole.minutes:.1f} minutes; model: {played.model or 'the default one'}; folder: {played.folder}"
    )
