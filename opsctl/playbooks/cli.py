"""``opsctl playbook``: list, lint, plan and run playbooks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import typer

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl import textfile
from opsctl.answer import Answer, Problem, Session
from opsctl.approvals import Approvals
from opsctl.drill import lifter
from opsctl.library import NotFound, Shelf
from opsctl.playbooks import actions, lint, needs
from opsctl.playbooks.actions import Place
from opsctl.playbooks.document import PlaybookError
from opsctl.playbooks.journal import Record, keeper, shown, utc
from opsctl.playbooks.run import Hands
from opsctl.playbooks.run import run as carry_out
from opsctl.playbooks.schema import Playbook, Step
from opsctl.playbooks.server import Deployed
from opsctl.rollout import lock, operator

app = typer.Typer(no_args_is_help=True, help="Changes, responses and experiments as documents: check one, see what it would do, run it.")

NAME = typer.Argument(help="A playbook's name (see list), or a file.")
FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
NAMES = typer.Argument(None, help="Names or files. [default: all]")
YES = typer.Option(False, "--yes", help="Do not ask before steps that need no approval.")
APPROVE = typer.Option([], "--approve", metavar="KIND", help="Approve steps of this kind, e.g. restart. Repeatable.")
REASON = typer.Option("", "--reason", help="Why; kept in the record.")
INCIDENT = typer.Option(False, "--incident", help="Begin a response although its probes see nothing that it would respond to.")
APPROVAL_WAIT = typer.Option(0.0, "--approval-wait-s", min=0.0, max=86_400.0, help="How long a step waits for `opsctl approve`.")


@app.command("list")
def list_(context: typer.Context, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """List the playbooks: those beside the fleet file (or in $OPSCTL_PLAYBOOKS) first, then the packaged ones."""
    session: Session = context.obj
    found = []
    for name, path in Shelf.of("playbooks", ".yaml", session.env, fleet_path).all().items():
        try:
            playbook = lint.read(path).playbook
            found.append({"name": name, "kind": playbook.kind, "summary": playbook.summary, "waits_for": needs.unmet(playbook, None),
                          "path": str(path)})  # fmt: skip
        except PlaybookError as error:
            found.append({"name": name, "kind": "broken", "summary": str(error.problems[0]), "waits_for": [], "path": str(path)})
    lines = [f"{one['name']:<32} {one['kind']:<10} {one['summary']}" + "".join(f"\n{'':<43} waiting, it {why}" for why in one["waits_for"])
             for one in found]  # fmt: skip
    session.show(Answer("playbook list", found, "\n".join(lines)), as_json=as_json)


@app.command()
def show(context: typer.Context, name: str = NAME, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """Print a playbook as it stands."""
    session: Session = context.obj
    path = _find(Shelf.of("playbooks", ".yaml", session.env, fleet_path), name)
    document = lint.read(path)
    text = textfile.read(path)
    data = {"name": document.playbook.name, "path": str(path), "playbook": document.playbook.model_dump(mode="json", exclude_defaults=True),
            "text": text}  # fmt: skip
    session.show(Answer("playbook show", data, text.rstrip("\n")), as_json=as_json)


@app.command("lint")
def lint_(context: typer.Context, names: list[str] = NAMES, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """Say what is wrong with playbooks, by file and line: their form, and commands that no longer exist. Exit 2 if anything is."""
    session: Session = context.obj
    shelf = Shelf.of("playbooks", ".yaml", session.env, fleet_path)
    paths = [_find(shelf, name) for name in names] if names else list(shelf.all().values())
    wrong = [problem for path in paths for problem in lint.problems(path)]
    data = {"files": [str(path) for path in paths], "problems": [vars(problem) for problem in wrong]}
    errors = tuple(Problem("lint", problem.text, where=f"{problem.file}:{problem.line}") for problem in wrong)
    text = f"{len(paths)} playbook{'' if len(paths) == 1 else 's'}, nothing wrong" if not wrong else ""
    session.show(Answer("playbook lint", data, text, ExitCode.USAGE if wrong else ExitCode.DONE, errors), as_json=as_json)


@app.command()
def plan(context: typer.Context, name: str = NAME, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON) -> None:
    """Show what a playbook would do here: commands, deadlines, approvals, what must hold. Touches nothing."""
    session: Session = context.obj
    whole = fleet.load(fleet_path)
    chosen = whole.one(deployment)
    playbook, path = _load(session, name, fleet_path)
    place = _place(session, fleet_path, chosen)
    missing = needs.unmet(playbook, chosen)
    data = {
        "playbook": playbook.name, "kind": playbook.kind, "path": str(path), "deployment": chosen.name, "unmet": missing,
        "approvals": list(playbook.approvals), "before": [one.model_dump() for one in playbook.hypothesis],
        "method": [_shown(step, place, playbook) for step in playbook.method],
        "rollbacks": [_shown(step, place, playbook) for step in playbook.rollbacks],
        "after": [one.model_dump() for one in playbook.expected],
    }  # fmt: skip
    code = ExitCode.USAGE if missing else ExitCode.DONE
    session.show(Answer("playbook plan", data, _plan_text(data, playbook), code, _unmet(playbook, missing)), as_json=as_json)


@app.command()
def run(
    context: typer.Context, name: str = NAME, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, yes: bool = YES,
    approve: list[str] = APPROVE, approval_wait_s: float = APPROVAL_WAIT, incident: bool = INCIDENT, reason: str = REASON,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Carry a playbook out. What undoes it runs once a step has acted, whatever happened; SIGTERM and Ctrl-C are no exception.

    A step that needs approval is agreed to at the terminal, by --approve, by `opsctl approve`, or by the fleet file, whose
    on_wedge names this playbook. Exit status: 0 done, 2 refused (nothing touched), 3 failed and rolled back, 4 stuck (look now),
    5 held for an approval, 6 locked, 7 unreachable, 9 what must hold does not.
    """
    session: Session = context.obj
    whole = fleet.load(fleet_path)
    chosen = whole.one(deployment)
    playbook, path = _load(session, name, fleet_path)
    wrong = lint.problems(path)
    if wrong:
        raise PlaybookError(wrong)
    missing = needs.unmet(playbook, chosen)
    if missing:
        session.show(Answer("playbook run", exit_code=ExitCode.USAGE, errors=_unmet(playbook, missing)), as_json=as_json)
        return
    unknown = [kind for kind in approve if kind not in playbook.approvals]
    if unknown:
        raise typer.BadParameter(f"--approve {unknown[0]}: {playbook.name} asks for {', '.join(playbook.approvals) or 'no approval'}")
    place = _place(session, fleet_path, chosen)
    if not yes and not (session.attended and _confirmed(session, playbook, place)):
        error = Problem("unattended", "nobody is there to ask", remedy="give --yes: it stands for steps that need no approval")
        session.show(Answer("playbook run", exit_code=ExitCode.USAGE, errors=(error,)), as_json=as_json)
        return
    who = operator.who(session.env)["user"]
    record = Record(f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}", playbook.name, playbook.kind, chosen.name,
                    who, reason, utc(time.time()), playbook.model_dump(mode="json", exclude_defaults=True))  # fmt: skip
    folder = fleet.state_root(session.env) / "playbooks" / chosen.name
    server = Deployed(whole, chosen, place)
    approvals = Approvals(session.env)

    def agree(step: Step, told: str) -> str:
        who = _agreed(session, step, told, approve, whole, chosen, playbook)
        if who or not approval_wait_s:
            return who
        answer = approvals.ask(
            chosen.name, step.approval, told, approval_wait_s, session.talk, of=f"playbook {playbook.name}, step {step.name}"
        )
        return f"{answer.by} by opsctl approve" if answer is not None and answer.granted else ""

    hands = Hands(server, agree, keeper(folder), session.talk)
    try:
        with lock.held(folder, f"playbook {playbook.name}", what="playbook", see=""), _lifted(playbook, place, session):
            code = carry_out(playbook, place, hands, record, incident=incident)
        if code is ExitCode.STUCK:
            paged = server.page(f"{chosen.name}: playbook {playbook.name} is stuck", f"{record.why} {folder / record.id}.json", record.id)
            record.page_sent = bool(paged.sent)
    finally:
        server.close()
    data = {**shown(record), "record": str(folder / f"{record.id}.json")}
    errors = (
        () if code is ExitCode.DONE else (Problem(record.outcome.replace(" ", "-"), record.why or "a page did not go out", playbook.name),)
    )
    session.show(Answer("playbook run", data, _run_text(record, str(data["record"])), code, errors), as_json=as_json)


def _lifted(playbook: Playbook, place: Place, session: Session) -> contextlib.AbstractContextManager[None]:
    """Where a step arms a fault: the death of this process in any way lifts it as well."""
    if not any(step.fault for step in playbook.method):
        return contextlib.nullcontext()
    return lifter.guarded(place.fleet, place.deployment, session.env, os.getpid())


def _find(shelf: Shelf, name: str) -> Path:
    try:
        return shelf.find(name)
    except NotFound as error:
        raise typer.BadParameter(str(error)) from error


def _load(session: Session, name: str, fleet_path: str) -> tuple[Playbook, Path]:
    path = _find(Shelf.of("playbooks", ".yaml", session.env, fleet_path), name)
    return lint.read(path).playbook, path


def _place(session: Session, fleet_path: str, chosen: fleet.Deployment) -> Place:
    return Place(str(Path(fleet_path).absolute()), chosen.name, chosen.api, chosen.api_key_file, dict(session.env))


def _unmet(playbook: Playbook, missing: list[str]) -> tuple[Problem, ...]:
    return tuple(Problem("needs", text, where=playbook.name, remedy="it is written for when this is there; nothing was touched")
                 for text in missing)  # fmt: skip


def _shown(step: Step, place: Place, playbook: Playbook) -> dict[str, Any]:
    return {"name": step.name, "action": step.action, "told": actions.told(step, place, playbook.name), "deadline_s": step.deadline_s,
            "approval": step.approval, "when": step.when}  # fmt: skip


def _plan_text(data: dict[str, Any], playbook: Playbook) -> str:
    def expected(found: list[dict[str, Any]]) -> list[str]:
        return [f"  {one['probe']}{' ' + json.dumps(one['tolerance']) if one['tolerance'] else ''}" for one in found]

    def steps(found: list[dict[str, Any]]) -> list[str]:
        return [f"  {at}. {one['name']}: {one['told']}\n     at most {one['deadline_s']:g} s"
                + (f", needs approval: {one['approval']}" if one["approval"] else "")
                + (", only after a failure" if one["when"] == "failed" else "") for at, one in enumerate(found, 1)]  # fmt: skip

    gates = {"holds": "it must hold, or nothing is begun", "fails": "while it holds, nothing is begun", "told": "told, whatever it is"}
    head = f"{playbook.name} ({playbook.kind}) on {data['deployment']}: {playbook.summary}"
    lines = [head, f"before ({gates[playbook.gate]}):", *expected(data["before"]), "method:", *steps(data["method"])]
    if data["rollbacks"]:
        lines += ["rollbacks, once a step has acted:", *steps(data["rollbacks"])]
    return "\n".join([*lines, "after (it must hold):", *expected(data["after"])])


def _run_text(record: Record, path: str) -> str:
    lines = [f"{section:<9} {check.name:<20} {check.outcome:<12} {check.evidence}" for section, checks in
             (("before", record.before), ("after", record.after)) for check in checks]  # fmt: skip
    steps = [f"{section:<9} {step.name:<20} {step.outcome:<12} {f'{step.seconds:.1f} s' if step.seconds else ''} {step.why}".rstrip()
             for section, found in (("method", record.method), ("rollback", record.rollbacks)) for step in found]  # fmt: skip
    return "\n".join([*lines[: len(record.before)], *steps, *lines[len(record.before) :], f"{record.playbook}: {record.outcome}", path])


def _confirmed(session: Session, playbook: Playbook, place: Place) -> bool:
    session.talk(f"{playbook.name}: {playbook.summary}")
    for step in playbook.method:
        session.talk(f"  {step.name}: {actions.told(step, place, playbook.name)}")
    return typer.confirm("run this?", err=True)


def _agreed(
    session: Session, step: Step, told: str, approve: list[str], whole: fleet.Fleet, chosen: fleet.Deployment, playbook: Playbook
) -> str:
    """Who approved a step; empty when nobody has."""
    who = operator.who(session.env)["user"]
    if step.approval in approve:
        return f"{who} by --approve"
    if chosen.on_wedge.action == "playbook" and chosen.on_wedge.playbook == playbook.name:
        return f"{whole.path}: deployment.{chosen.name}.on_wedge"
    try:
        agreed = session.attended and typer.confirm(f"{step.name} needs approval ({step.approval}): {told}\nagree?", err=True)
    except typer.Abort as error:
        raise KeyboardInterrupt from error  # also where the terminal is gone
    if agreed:
        return f"{who} at the terminal"
    return ""
