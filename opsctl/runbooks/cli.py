"""``opsctl runbook``: list, show, lint and run runbooks; ``opsctl approve``: agree to a step that waits."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import typer

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl import wholefile
from opsctl.answer import Answer, Problem, Session
from opsctl.approvals import Approvals, NoSuchRequest, Request
from opsctl.library import NotFound, Shelf
from opsctl.playbooks.journal import utc
from opsctl.playbooks.process import Ran, end_in
from opsctl.rollout import operator
from opsctl.runbooks import lint
from opsctl.runbooks.document import Runbook, RunbookError, Step, read
from opsctl.runbooks.run import Allowed, Asked, Decider, Run, RunRecord, no_value
from opsctl.runbooks.values import Values

app = typer.Typer(no_args_is_help=True, help="What to do at 05:41: list, read, check and run the runbooks.")

NAME = typer.Argument(help="A runbook's name (see list), or a file.")
FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
NAMES = typer.Argument(None, help="Names or files. [default: all]")
WITH = typer.Option([], "--with", metavar="NAME=VALUE", help="A variable that a step needs, e.g. PID=4711. Repeatable.")
APPROVE = typer.Option([], "--approve", metavar="KIND", help="With --yes: approve steps of this kind, e.g. restart.")
SKIP = typer.Option([], "--skip", metavar="STEP", help="With --yes: leave this step out.")
_PAIR = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)


@app.command("list")
def list_(context: typer.Context, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """List the runbooks: those beside the fleet file (or in $OPSCTL_RUNBOOKS) first, then the packaged ones."""
    session: Session = context.obj
    found: list[dict[str, Any]] = []
    for name, path in _shelf(session, fleet_path).all().items():
        try:
            book = read(path)
            found.append({"name": name, "class": book.verdict, "severity": book.severity, "summary": book.summary,
                          "steps": [step.name for step in book.steps], "path": str(path)})  # fmt: skip
        except RunbookError as error:
            found.append(
                {"name": name, "class": "", "severity": "broken", "summary": str(error.problems[0]), "steps": [], "path": str(path)}
            )
    lines = [f"{one['name']:<22} {one['severity']:<7} {len(one['steps'])} steps  {one['summary']}" for one in found]
    session.show(Answer("runbook list", found, "\n".join(lines)), as_json=as_json)


@app.command()
def show(context: typer.Context, name: str = NAME, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """Print a runbook as it stands."""
    session: Session = context.obj
    book = _read(session, name, fleet_path)
    data = {"name": book.name, "class": book.verdict, "severity": book.severity, "summary": book.summary, "approvals": dict(book.approvals),
            "steps": [vars(step) for step in book.steps], "text": book.text, "path": book.path}  # fmt: skip
    session.show(Answer("runbook show", data, book.text.rstrip("\n")), as_json=as_json)


@app.command("lint")
def lint_(context: typer.Context, names: list[str] = NAMES, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """Say what is wrong with runbooks, by file and line: their form, and commands that no longer exist. Exit 2 if anything is."""
    session: Session = context.obj
    shelf = _shelf(session, fleet_path)
    paths = [_find(shelf, name) for name in names] if names else list(shelf.all().values())
    wrong = [problem for path in paths for problem in lint.problems(path)]
    data = {"files": [str(path) for path in paths], "problems": [vars(problem) for problem in wrong]}
    errors = tuple(Problem("lint", problem.text, where=f"{problem.file}:{problem.line}") for problem in wrong)
    text = f"{len(paths)} runbook{'' if len(paths) == 1 else 's'}, nothing wrong" if not wrong else ""
    session.show(Answer("runbook lint", data, text, ExitCode.USAGE if wrong else ExitCode.DONE, errors), as_json=as_json)


@app.command()
def run(
    context: typer.Context, name: str = NAME, fleet_path: str = FLEET, deployment: str = DEPLOYMENT,
    bundle: str = typer.Option("", "--bundle", help="The incident's bundle; the record of the run goes there too."),
    given: list[str] = WITH,
    yes: bool = typer.Option(False, "--yes", help="Do not ask: run what needs no approval."),
    approve: list[str] = APPROVE,
    skip: list[str] = SKIP,
    approval_wait_s: float = typer.Option(0.0, "--approval-wait-s", min=0.0, max=86_400.0,
                                         help="With --yes: how long a step waits for `opsctl approve`."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Go through a runbook step by step. At a terminal each command is shown, and run, skipped or edited on a key.

    Variables that the runbook's text names are found in the bundle and the fleet file where it says so (`fills` of its front
    matter), each told with where from; the others are asked for, or with --yes refused by name before anything is run.
    Exit status: 0 every step went as it should, 2 usage, 3 4 6 7 as the step that ended it, 5 a step waits for an approval or
    a value, 9 a step did not go as it should, 130 left or interrupted.
    """
    session: Session = context.obj
    book = _read(session, name, fleet_path)
    if wrong := lint.problems(Path(book.path)):
        raise RunbookError(wrong)
    chosen = fleet.load(fleet_path).one(deployment)
    values = {
        "FLEET": str(Path(fleet_path).absolute()),
        "DEPLOYMENT": chosen.name,
        **({"BUNDLE": bundle} if bundle else {}),
        **_values(given),
    }
    _check_names(book, approve, skip)
    if bundle and not Path(bundle).is_dir():
        raise typer.BadParameter(f"--bundle {bundle}: no such folder")
    told = Values(book, chosen)
    decider: Decider
    who = operator.who(session.env)["user"]
    if yes:
        _check_values(book, told, values, chosen.service, lambda step: step.name not in skip and (
            not step.approval or step.approval in approve or approval_wait_s > 0))  # fmt: skip
        approvals = Approvals(session.env)
        decider = Allowed(frozenset(approve), frozenset(skip), who, lambda step, command: approvals.ask(
            chosen.name, step.approval, command, approval_wait_s, session.talk, of=f"runbook {book.name}, step {step.name}"))  # fmt: skip
    elif session.attended:
        decider = Asked(lambda question: _line(session, question), who, book.approvals, values)
    else:
        raise typer.BadParameter("nobody is there to ask; give --yes, and --approve KIND for what needs it")
    began = utc(time.time())
    record = RunRecord(f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}", book.name, chosen.name, who, began)
    folder = fleet.state_root(session.env) / "runbooks" / chosen.name
    keep = _keeper(folder, values)
    run_of = Run(book, decider, _executor(session, aloud=not yes), keep, session.talk, lambda: utc(time.time()), values, told.find,
                 chosen.service, aloud=not yes)  # fmt: skip
    code = run_of.go(record)
    data = {**msgspec.to_builtins(record), "fidelity": record.fidelity, "record": str(folder / f"{record.id}.json")}
    errors = () if code is ExitCode.DONE else (Problem(record.outcome, _why(record), where=f"{book.name}: {record.steps[-1].name}"),)
    if run_of.lost:
        errors = (*errors, Problem("not-recorded", f"the record could not be written: {run_of.lost}", where=str(folder)))
        code = code or ExitCode.INTERNAL
    session.show(Answer("runbook run", data, _text(record, data["record"]), code, errors), as_json=as_json)


def approve(
    context: typer.Context,
    name: str | None = typer.Argument(None, help="The request, as the waiting command named it. [default: list them]"),
    refuse: bool = typer.Option(False, "--refuse", help="Say no."), as_json: bool = JSON,
) -> None:  # fmt: skip
    """Agree to a step that another command waits for; without a name, list what waits."""
    session: Session = context.obj
    approvals = Approvals(session.env)
    if name is None:
        waiting = approvals.waiting()
        lines = [_waits(one) for one in waiting]
        session.show(Answer("approve", msgspec.to_builtins(waiting), "\n".join(lines) or "nothing waits for an approval"), as_json=as_json)
        return
    try:
        done = approvals.answer(name, granted=not refuse)
    except NoSuchRequest as error:
        session.show(Answer("approve", exit_code=ExitCode.USAGE, errors=(Problem("approve", str(error)),)), as_json=as_json)
        return
    session.show(Answer("approve", msgspec.to_builtins(done), f"{done.answer}: {done.what}"), as_json=as_json)


def _waits(one: Request) -> str:
    since, until = (time.strftime("%H:%M:%SZ", time.gmtime(at)) for at in (one.since_unix_s, one.until_unix_s))
    return f"{one.id}  {one.deployment}  {one.kind}  {one.what}\n        {one.of}; asked by {one.asked_by} at {since}, waits until {until}"


def _shelf(session: Session, fleet_path: str) -> Shelf:
    return Shelf.of("runbooks", ".md", session.env, fleet_path)


def _find(shelf: Shelf, name: str) -> Path:
    try:
        return shelf.find(name)
    except NotFound as error:
        raise typer.BadParameter(str(error)) from error


def _read(session: Session, name: str, fleet_path: str) -> Runbook:
    return read(_find(_shelf(session, fleet_path), name))


def _values(given: list[str]) -> dict[str, str]:
    found = {}
    for pair in given:
        match = _PAIR.fullmatch(pair)
        if match is None:
            raise typer.BadParameter(f"--with {pair}: write NAME=VALUE, the name in capitals as the runbook has it")
        found[match[1]] = match[2]
    return found


def _check_names(book: Runbook, approve: list[str], skip: list[str]) -> None:
    for kind in approve:
        if kind not in book.approvals:
            raise typer.BadParameter(f"--approve {kind}: {book.name} asks for {', '.join(book.approvals) or 'no approval'}")
    names = [step.name for step in book.steps]
    for name in skip:
        if name not in names:
            raise typer.BadParameter(f"--skip {name}: the steps of {book.name} are {', '.join(names)}")


def _check_values(book: Runbook, told: Values, values: dict[str, str], manager: str, does: Callable[[Step], bool]) -> None:
    """A step for which nobody and nothing has a value is refused before the first one is run."""
    steps = tuple(step for step in book.steps if step.applies(manager) and does(step))
    wrong = [f"{step.name}: {no_value(step, missing)}" for step, missing in told.without(steps, values, values.get("BUNDLE", ""))]
    if wrong:
        raise typer.BadParameter(f"{book.name}: {'; '.join(wrong)}")


def _line(session: Session, question: str) -> str:
    _forget_typed(session)
    session.stderr.write(question)
    session.stderr.flush()
    line = session.stdin.readline()
    if not line:
        raise KeyboardInterrupt  # the terminal is gone
    return line


def _forget_typed(session: Session) -> None:
    """Keys that were pressed while a step ran answer no question that had not been put."""
    with contextlib.suppress(OSError, ValueError, termios.error):  # no terminal of the system's: a test's
        termios.tcflush(session.stdin.fileno(), termios.TCIFLUSH)


def _executor(session: Session, *, aloud: bool) -> Callable[[list[str], float], Ran]:
    """``aloud``: what a step says is shown as it comes."""

    def execute(argv: list[str], deadline_s: float) -> Ran:
        heard = (lambda line: session.talk(f"    | {line}")) if aloud else None
        return end_in(argv, deadline_s, env=dict(session.env), talk=lambda text: session.talk(f"    {text}"), heard=heard)

    return execute


def _keeper(folder: Path, values: dict[str, str]) -> Callable[[RunRecord], None]:
    """Writes the record to ``folder``, and beside the bundle's artefacts where there is one, which may be on another disk."""

    def keep(record: RunRecord) -> None:
        content = (json.dumps(msgspec.to_builtins(record), indent=1) + "\n").encode()  # it knows names that are no UTF-8
        homes = [(folder, f"{record.id}.json")]
        if values.get("BUNDLE") and Path(values["BUNDLE"]).is_dir():
            homes.append((Path(values["BUNDLE"]), f"runbook-{record.id}.json"))
        broke = None
        for home, name in homes:
            try:
                wholefile.write(home / name, content)
            except OSError as error:
                broke = broke or error
        if broke is not None:
            raise broke

    return keep


def _why(record: RunRecord) -> str:
    return record.steps[-1].why or record.steps[-1].outcome


def _text(record: RunRecord, path: str) -> str:
    lines = [f"{step.name:<18} {step.outcome:<12} {f'{step.seconds:.1f} s' if step.seconds else '':>8}  {step.why}".rstrip()
             for step in record.steps]  # fmt: skip
    return "\n".join([*lines, f"{record.runbook}: {record.outcome}", path])
