"""``opsctl drill``: list, run, score and calendar."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from monitors import fleet
from monitors.exit_codes import ExitCode
from monitors.judge.verdict import Class
from opsctl import wholefile
from opsctl.answer import Answer, Problem, Session
from opsctl.drill import history, report
from opsctl.drill.auto import Auto
from opsctl.drill.person import Person
from opsctl.drill.play import play
from opsctl.drill.playing import Responder
from opsctl.drill.score import MOMENTS, Score, table
from opsctl.drill.stage import Stage, booted, staged
from opsctl.library import NotFound, Shelf
from opsctl.load.results import here
from opsctl.playbooks import lint
from opsctl.playbooks.document import PlaybookError
from opsctl.playbooks.schema import Drill, Playbook
from opsctl.replay import cli as replay
from opsctl.rollout import lock
from opsctl.runbooks import document as runbook
from opsctl.staging.waiting import StageError

app = typer.Typer(no_args_is_help=True, help="Practise: inject a real fault, see it found, captured and mended, and keep the score.")

JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
NAMES = typer.Argument(None, help="Names of drills (see list), or files.")
FLEET = typer.Option("", "--fleet", help="The fleet file of a staging deployment. [default: an engine is booted for it]")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment of it. [default: the only one]")


@app.command("list")
def list_(context: typer.Context, as_json: bool = JSON) -> None:
    """List the drills: what each injects, and the verdict that is expected."""
    session: Session = context.obj
    found = []
    for playbook in _all(session).values():
        drill = _drill(playbook)
        found.append({"name": playbook.name, "summary": playbook.summary, "verdicts": list(drill.verdicts), "also": list(drill.also),
                      "runbook": drill.runbook, "server": list(drill.server),
                      "injects": [step.fault or step.name for step in playbook.method]})  # fmt: skip
    found += replay.known()
    lines = []
    for one in found:
        verdicts = " and ".join(filter(None, ("/".join(one["verdicts"]), *one["also"]))) or "-"
        lines.append(f"{one['name']:<28} {verdicts:<36} {one['summary']}")
    session.show(Answer("drill list", found, "\n".join(lines)), as_json=as_json)


@app.command()
def run(
    context: typer.Context, names: list[str] = NAMES, every: bool = typer.Option(False, "--all", help="Every drill there is."),
    attended: bool = typer.Option(False, "--attended", help="A person plays: only what somebody on call would see. [default: --auto]"),
    auto: bool = typer.Option(False, "--auto", help="The runbook's own steps are carried out."),
    fleet_path: str = FLEET, deployment: str = DEPLOYMENT,
    model: str = typer.Option("", "--model", help="Hugging Face folder to serve. [default: the default model]"),
    seed: int = typer.Option(-1, "--seed", help="Of the moment of injection. [default: another one each time]"),
    deadline_s: float = typer.Option(1800.0, "--deadline-s", min=1.0, max=86_400.0, help="Of a person."),
    only: list[str] = typer.Option([], "--only", metavar="STEP", help="Of a day that is replayed: this step, with those it needs."),  # noqa: B008
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Play drills, one after another; those that ask for the same server share it. Or replay a day on two systemd nodes.

    A deployment must say allow_faults. Every fault is lifted at the end, whatever happened, also when opsctl is killed.
    With --attended and no name one is drawn, and its name is told at the end.
    Exit status: 0 all passed, 2 refused, 9 one failed, or could not be played because its server is not well.
    """
    session: Session = context.obj
    if attended and auto:
        raise typer.BadParameter("--attended and --auto: one of them")
    if attended and not session.attended:
        raise typer.BadParameter("--attended: standard input is no terminal")
    if replay.play(session, names or (), only, model, alone=not (every or attended or fleet_path), as_json=as_json):
        return
    if (every and names) or not (every or names or attended):
        raise typer.BadParameter("give names of drills, or --all; with --attended none: one is drawn")
    known = list(_all(session).values())
    chosen = known if every else [_one(session, name) for name in names or ()] or [_drawn(known, seed)]
    where = _allowed(fleet_path, deployment)
    scores: list[Score] = []
    problems: list[Problem] = []
    drills = fleet.state_root(session.env) / "drills"
    root = drills / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    responder: Responder = Person(session.stdin.readline, deadline_s) if attended else Auto()
    with _alone(drills, where):
        for at, same in enumerate(_together(chosen)):
            problems += _group(session, same, responder, where, root / str(at), model, seed if seed >= 0 else None, scores)
    text = table(scores) if scores else ""
    failed = [score for score in scores if not score.passed]
    code = ExitCode.FOUND if problems or failed else ExitCode.DONE
    problems += [Problem("failed", "; ".join(score.problems), where=score.drill) for score in failed]
    session.show(Answer("drill run", msgspec.to_builtins(scores), text, code, tuple(problems)), as_json=as_json)


@app.command()
def score(
    context: typer.Context, names: list[str] = NAMES, most: int = typer.Option(20, "--most", min=1, help="The last so many."),
    plot: str = typer.Option("", "--plot", metavar="FILE", help="Write the trend of one drill as SVG."),
    to: str = typer.Option("", "--report", metavar="FILE", help="Write the last score of each drill, and what each runbook's steps did."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Show what was scored, oldest first."""
    session: Session = context.obj
    played = history.read(history.path_of(session.env))
    _check_known(names or [], {*_all(session), *(one["name"] for one in replay.known()), *(one.drill for one in played)})
    scores = [one for one in played if not names or one.drill in names]
    if to:
        books = [runbook.read(path) for path in Shelf.of("runbooks", ".md", session.env).all().values()]
        wholefile.write(Path(to), report.page(report.latest(scores), books, _machine()).encode())
    if plot:
        if len({one.drill for one in scores}) != 1:
            raise typer.BadParameter("--plot: name one drill that was played")
        if all(getattr(one.moments, name) is None for one in scores for name in MOMENTS[1:]):
            raise typer.BadParameter(f"--plot: {scores[0].drill} has no moments that could be drawn; opsctl drill score shows how it went")
        wholefile.write(Path(plot), history.trend(scores).encode())
    text = table(scores[-most:]) if scores else f"{', '.join(names) if names else 'no drill'} was not played yet"
    session.show(Answer("drill score", msgspec.to_builtins(scores[-most:]), text), as_json=as_json)


@app.command()
def calendar(context: typer.Context, as_json: bool = JSON) -> None:
    """Show which drill is due when, the most overdue first. Exit status 9 when one is overdue or was never passed."""
    session: Session = context.obj
    every_days = {name: _drill(playbook).every_days for name, playbook in _all(session).items()} | replay.every_days()
    due = history.calendar(every_days, history.read(history.path_of(session.env)), datetime.datetime.now(datetime.UTC).date())
    lines, wide = [], max((len(one.drill) for one in due), default=0) + 1
    for one in due:
        last = f"last {one.last_utc[:10]} ({'passed' if one.passed else 'failed'})" if one.last_utc else "never played"
        when = "due now" if one.days is None else f"overdue by {-one.days} days" if one.days < 0 else f"due in {one.days} days"
        lines.append(f"{one.drill:<{wide}} {when:<22} {last}, every {one.every_days} days")
    late = any(one.days is None or one.days < 0 for one in due)
    session.show(
        Answer("drill calendar", msgspec.to_builtins(due), "\n".join(lines), ExitCode.FOUND if late else ExitCode.DONE), as_json=as_json
    )


def _check_known(names: list[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(sorted(known))}"
            raise typer.BadParameter(f"no drill {name!r}; {hint}")


def _machine() -> str:
    host = here()
    return f"{host.cpu}, {host.cores} cores"


def _group(session: Session, same: list[Playbook], responder: Responder, where: tuple[str, str] | None, folder: Path, model: str,
           seed: int | None, scores: list[Score]) -> list[Problem]:  # fmt: skip
    """Play drills on one server; on a new one where the last drill left it changed. Returns why one could not be played."""
    left, homeless = list(same), list[Problem]()
    attempt = 0
    while left:
        home = folder.with_name(f"{folder.name}-{attempt}") if attempt else folder
        attempt += 1
        before, now, said = len(left), left[0], set[str]()
        try:
            with _stage(session, _drill(now), where, home, model) as stage:
                while left:
                    now = left.pop(0)
                    found = _played(session, now, stage, responder, seed, homeless)
                    scores.append(found)
                    said |= set(found.verdicts)
                    if stage.own and (stage.changed or not found.passed or (left and _paged_already(left[0], said))):
                        break
        except (StageError, OSError) as error:
            session.talk(f"{now.name}: not played")
            homeless.append(Problem("stage", str(error), where=now.name, remedy=f"logs: {home}"))
            if len(left) == before:  # there is no server for the others either
                return homeless
    return homeless


def _alone(drills: Path, where: tuple[str, str] | None) -> contextlib.AbstractContextManager[None]:
    """Two drills on one deployment would lift each other's faults and answer each other's pages. Raises Locked."""
    return lock.held(drills / where[1], "drill run", what="drill", see="") if where else contextlib.nullcontext()


def _paged_already(playbook: Playbook, said: set[str]) -> bool:
    """Whether the same monitor would not page for it: two wedges are two incidents, but a crash or wrong answers of the same
    class are one for some minutes."""
    drill = _drill(playbook)
    return any(name in said and not Class(name).is_hang for name in (*drill.verdicts, *drill.also))


def _played(session: Session, playbook: Playbook, stage: Stage, responder: Responder, seed: int | None, problems: list[Problem]) -> Score:
    """``problems`` gets why its score could not be written down."""
    secret = responder.mode != "auto"  # a person is told afterwards what it was
    session.talk("\nSomething will happen to it." if secret else f"\n{playbook.name}: {playbook.summary}")
    found = play(playbook, stage, responder, session.talk, seed=seed)
    try:
        history.add(history.path_of(session.env), found)
    except OSError as error:
        problems.append(Problem("not written", f"the score is not in the history: {error}", where=playbook.name))
    ended = f"{playbook.name}: {'passed' if found.passed else 'FAILED'}, {found.points} points"
    told = [f"It was: {playbook.summary}"] if secret else []
    session.talk("\n    ".join(["\n".join([*told, ended]), *found.problems]))
    return found


@contextlib.contextmanager
def _stage(session: Session, drill: Drill, where: tuple[str, str] | None, folder: Path, model: str) -> Iterator[Stage]:
    if where is None:
        with booted(drill, session.env, session.talk, folder, model) as stage:
            yield stage
    else:
        with staged(*where, session.env, folder) as stage:
            yield stage


def _together(chosen: list[Playbook]) -> list[list[Playbook]]:
    """Drills that ask for the same server, those that change its configuration last."""
    groups: dict[tuple[object, ...], list[Playbook]] = {}
    for playbook in chosen:
        drill = _drill(playbook)
        groups.setdefault((drill.server, drill.canary, drill.gateway, drill.outdated), []).append(playbook)
    return [sorted(group, key=_changes) for group in groups.values()]


def _changes(playbook: Playbook) -> bool:
    drill = _drill(playbook)
    return drill.by_hand is not None or "change-configuration" in drill.approve or any(step.rollout for step in playbook.method)


def _allowed(fleet_path: str, deployment: str) -> tuple[str, str] | None:
    if not fleet_path:
        if deployment:
            raise typer.BadParameter("--deployment: of which fleet file? give --fleet")
        return None
    chosen = fleet.load(fleet_path).one(deployment)
    if not chosen.allow_faults:
        raise typer.BadParameter(f"{fleet_path}: deployment.{chosen.name} does not say allow_faults = true: nothing is injected there")
    return str(Path(fleet_path).absolute()), chosen.name


def _all(session: Session) -> dict[str, Playbook]:
    found = {}
    for name, path in Shelf.of("playbooks", ".yaml", session.env).all().items():
        try:
            playbook = lint.read(path).playbook
        except PlaybookError:
            continue  # `opsctl playbook lint` says why; it is no drill of ours to judge here
        if playbook.kind == "drill":
            found[name] = playbook
    return found


def _drawn(known: list[Playbook], seed: int) -> Playbook:
    """One of those that page somebody and need a verdict."""
    worth = [playbook for playbook in known if _drill(playbook).pages and _drill(playbook).verdicts]
    return random.Random(seed if seed >= 0 else None).choice(worth)


def _one(session: Session, name: str) -> Playbook:
    """By its name, with or without ``drill-``, or by a file."""
    known = _all(session)
    if f"drill-{name}" in known:
        name = f"drill-{name}"
    shelf = Shelf.of("playbooks", ".yaml", session.env)
    if name not in shelf.all() and "/" not in name and not name.endswith(".yaml"):
        _check_known([name], {*known, *(one["name"] for one in replay.known())})
    try:
        path = shelf.find(name)
    except NotFound as error:
        raise typer.BadParameter(str(error)) from error
    if wrong := lint.problems(path):
        raise PlaybookError(wrong)
    playbook: Any = lint.read(path).playbook
    if playbook.kind != "drill":
        raise typer.BadParameter(f"{name}: a playbook of kind {playbook.kind}, no drill")
    found: Playbook = playbook
    return found


def _drill(playbook: Playbook) -> Drill:
    assert playbook.drill is not None
    return playbook.drill
