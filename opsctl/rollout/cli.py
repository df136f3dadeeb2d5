"""``opsctl rollout``: change a deployment's flags under guard."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session
from opsctl.library import Shelf
from opsctl.rollout import boots, plantext, standing, survey
from opsctl.rollout.deadlines import MOST_S
from opsctl.rollout.desk import Desk
from opsctl.rollout.options import Options, changing
from opsctl.rollout.pager import UrlPager
from opsctl.rollout.plan import Plan
from opsctl.rollout.result import Result
from opsctl.service.voice import Voice
from opsctl.service.wait import Waiter

app = typer.Typer(
    no_args_is_help=True,
    help="""Change a deployment's flags under guard: proven by real completions, else reverted by itself.

\b
At night, in this order:
  opsctl rollout status                        what runs, and whether a rollout is open
  opsctl rollout plan  --set FLAG=VALUE        what would happen; touches nothing
  opsctl rollout apply --set FLAG=VALUE --reason "why"
                                               add --incident when the server is down or wedged
  opsctl rollout abort                         back to the last verified configuration
While all is well, once: opsctl rollout verify (it is what a revert goes back to).

Whatever becomes of this command, its machine or the network: each node goes back by itself, and pages.
""",
)

FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
REASON = typer.Option("", "--reason", help="Why; kept in the journal.")
LOCK_WAIT = typer.Option(
    0.0, "--lock-wait", metavar="SECONDS", min=0.0, max=MOST_S, help="Wait so long for another rollout to end, instead of exit status 6."
)
ATTENDED = typer.Option(
    False, "--attended", help="Somebody watches: hold what cannot be told, instead of reverting. [default: on a terminal]"
)


@contextlib.contextmanager
def _desk(session: Session, path: str, deployment: str, lock_wait_s: float = 0.0) -> Iterator[tuple[Desk, Voice]]:
    """The desk of a deployment, whose waits are never silent for long."""
    with (
        Voice(session.talk).kept_up() as voice,
        Desk(fleet.load(path), deployment, session.env, Waiter(talk=voice), lock_wait_s=lock_wait_s) as desk,
    ):
        yield desk, voice


def _shelf(session: Session, fleet_path: str) -> Shelf:
    return Shelf.of("playbooks", ".yaml", session.env, fleet_path)


def _plan_text(made: Plan, desk: Desk, more: str | None = None) -> str:
    return plantext.text(made, survey.told(made, desk.survey.unagreed(made)), boots.read(desk.folder), more)


def _more(made: Plan, fleet_path: str, deployment: str) -> str:
    """What else an apply of this plan has to say."""
    said = [one for name, agreed in made.agreed.items() if agreed.where != "the fleet file"
            for one in ("--expect-change", f"{name}={agreed.to}", "--review-by", agreed.review_by)]  # fmt: skip
    said += ["--reason", made.reason] if made.reason else []
    said += ["--fleet", fleet_path] if fleet_path != "fleet.toml" else []
    said += ["--deployment", deployment] if deployment else []
    return "".join(f" {shlex.quote(word)}" for word in said)


def _plan_data(made: Plan) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(made)
    return {**data, "digest": made.digest, "diff": made.diff()}


def _finished(session: Session, command: str, result: Result, as_json: bool) -> None:
    good = result.exit_code is ExitCode.DONE or result.as_ordered
    errors = () if good else (Problem(str(result.state), result.why, where=result.deployment),)
    session.show(Answer(command, result.data(), result.text(), result.exit_code, errors), as_json=as_json)


@app.command()
@changing
def plan(context: typer.Context, *, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON, options: Options) -> None:
    """Show what a change would do, for every service: arguments, files, order, deadlines, revert target. Touches nothing.

    For example: opsctl rollout plan --set grammar-backend=none
    """
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as (desk, _):
        made = desk.plan(options.wish(desk.deployment.caller, _shelf(session, fleet_path), attended=False))
        session.show(Answer("rollout plan", _plan_data(made), _plan_text(made, desk, _more(made, fleet_path, deployment))), as_json=as_json)


@app.command()
@changing
def apply(
    context: typer.Context, *, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, attended: bool = ATTENDED,
    yes: bool = typer.Option(False, "--yes", help="Do not ask."), dry_run: bool = typer.Option(False, "-n", "--dry-run", help="Only plan."),
    lock_wait: float = LOCK_WAIT, as_json: bool = JSON, options: Options,
) -> None:  # fmt: skip
    """Carry a change out: change, restart, prove, watch, commit. Whatever fails is reverted, and the revert proven.

    It shows the plan and asks before it touches anything. Ctrl-C reverts; a second one leaves that to each node. For example:
    opsctl rollout apply --set grammar-backend=none --reason "hang at the grammar barrier"

    Exit status: 0 committed, 3 reverted, 4 stuck (look now), 5 held, 6 locked, 7 unreachable, 9 the baseline is not green.
    """
    session: Session = context.obj
    with _desk(session, fleet_path, deployment, lock_wait) as (desk, voice):
        wish = options.wish(desk.deployment.caller, _shelf(session, fleet_path), attended=attended or session.attended)
        if dry_run:
            made = desk.plan(wish)
            session.show(
                Answer("rollout apply", _plan_data(made), _plan_text(made, desk, _more(made, fleet_path, deployment))), as_json=as_json
            )
            return

        def agree(made: Plan) -> bool:
            session.talk(_plan_text(made, desk))
            if yes or not session.attended:
                return yes
            with voice.quiet():
                return typer.confirm("apply this?", err=True)

        _finished(session, "rollout apply", desk.apply(wish, agree), as_json)


@app.command()
def resume(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, attended: bool = ATTENDED, reason: str = REASON,
    lock_wait: float = LOCK_WAIT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Carry on with a rollout that was held or cut off, from where its journal ends: to its commit, or to its revert."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment, lock_wait) as (desk, _):
        _finished(session, "rollout resume", desk.resume(attended=attended or session.attended, reason=reason), as_json)


@app.command()
def abort(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, reason: str = REASON, lock_wait: float = LOCK_WAIT,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """End a rollout that is open: back to the last verified configuration, and prove it. Not for one that was committed:
    that is changed back by another rollout.

    Exit status: 3 reverted as ordered and verified, 0 it had been decided as committed before, 4 stuck (look now), 2 none is open.
    """
    session: Session = context.obj
    with _desk(session, fleet_path, deployment, lock_wait) as (desk, _):
        _finished(session, "rollout abort", desk.abort(reason), as_json)


@app.command()
def verify(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT,
    stable: float | None = typer.Option(None, "--stable-s", metavar="SECONDS", min=0.0, max=MOST_S,
                                        help="How long it must have held. [default: the fleet file's stable_s]"),
    lock_wait: float = LOCK_WAIT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Prove what runs now, and record it as what a revert goes back to.

    A start that is younger than --stable-s is watched until it is that old: a crash loop has its good minutes.
    """
    session: Session = context.obj
    with _desk(session, fleet_path, deployment, lock_wait) as (desk, _):
        found, checks = desk.verify(stable)
    data = {"verified": msgspec.to_builtins(found), "checks": msgspec.to_builtins(checks)}
    text = "\n".join(f"{check.name:<12} {check.outcome:<12} {check.evidence}" for check in checks)
    text += f"\nrecorded: a revert goes back to this ({found.digest[:12] or 'no digest'})" if found else (
        "\nnot proven, so nothing was recorded; what is wrong: opsctl triage")  # fmt: skip
    code = ExitCode.DONE if found else ExitCode.FOUND
    session.show(Answer("rollout verify", data, text, code), as_json=as_json)


@app.command()
def status(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON) -> None:
    """Say what each service runs, what holds it, which files are mounted over others, how the last rollout ended or stands,
    and what to do next. Touches nothing."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as (desk, _):
        data = desk.status()
    away = tuple(Problem("unreachable", one["error"], where=one["name"], remedy="try the node's `ssh` of the fleet file by hand")
                 for one in data["services"] if one["error"])  # fmt: skip
    code = ExitCode.UNREACHABLE if away else ExitCode.DONE
    session.show(Answer("rollout status", data, standing.text(data), code, away), as_json=as_json)


@app.command()
def history(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON) -> None:
    """List the rollouts of a deployment: who did what, why, and how it ended."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as (desk, _):
        found = desk.history()
        empty = f"no rollout of {desk.deployment.name} yet (journals would lie in {desk.folder})"
    lines = [
        f"{r['id']}  {r['state']:<10} {r['by']:<10} {' '.join(r['edits'])}{'  # ' + r['reason'] if r['reason'] else ''}"
        + (f"\n{'':<24}{r['why'][:160]}" if r["why"] and r["state"] != "committed" else "")
        for r in found
    ]
    session.show(Answer("rollout history", found, "\n".join(lines) or empty), as_json=as_json)


@app.command()
def show(
    context: typer.Context, rollout: str = typer.Argument("", help="Its id, or the beginning of it. [default: the last]"),
    fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Show one rollout from its journal: the plan, who did what when and why, every check, how it ended."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as (desk, _):
        data, text = desk.show(rollout)
    session.show(Answer("rollout show", data, text), as_json=as_json)


@app.command("deadman-page", hidden=True)
def deadman_page(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, rollout: str = typer.Option("")) -> None:
    """Run by a dead-man after it reverted: tell the people of the fleet file."""
    session: Session = context.obj
    found = fleet.load(Path(fleet_path))
    if session.env.get("OPSCTL_OUTCOME") == "committed":
        title = f"{deployment}: rollout committed by the dead-man"
        body = "Its operator fell silent after it was decided. Look at it: opsctl rollout resume"
    else:
        title = f"{deployment}: rollout reverted by the dead-man"
        body = "Its operator fell silent, so the services went back to the last committed configuration. Prove it: opsctl rollout resume"
    pager = UrlPager(found.page.urls, owed=fleet.state_root(session.env) / "owed")
    page = pager.page(title, body, rollout)
    with _desk(session, fleet_path, deployment) as (desk, _):
        left = desk.put_back(rollout)
    if left:
        page = pager.page(f"{deployment}: out of its router", left, rollout)
    code = ExitCode.DONE if page.sent else ExitCode.INTERNAL
    session.show(Answer("rollout deadman-page", {"page_sent": page.sent, "reason": page.reason}, exit_code=code), as_json=False)
