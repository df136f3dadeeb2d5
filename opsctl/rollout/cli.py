"""``opsctl rollout``: change a deployment's flags under guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import typer

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session
from opsctl.callers import agreed
from opsctl.rollout import flags, survey
from opsctl.rollout.desk import Desk, Wish
from opsctl.rollout.pager import UrlPager
from opsctl.rollout.plan import Plan, Times
from opsctl.rollout.result import Result
from opsctl.service.wait import Waiter

app = typer.Typer(
    no_args_is_help=True, help="Change a deployment's flags under guard: proven by real completions, else reverted by itself."
)

FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
SET = typer.Option(
    [], "--set", metavar="FLAG[=VALUE]", help="Set a flag, e.g. grammar-backend=none or disable-overlap-schedule. Repeatable."
)
UNSET = typer.Option([], "--unset", metavar="FLAG", help="Take a flag out. Repeatable.")
ENV = typer.Option([], "--env", metavar="NAME=VALUE", help="Set a variable of the service's environment. Repeatable.")
BOOT = typer.Option(None, "--boot-deadline-s", help="A start that is not ready by then has failed. [default: the fleet file's, 720]")
STABLE = typer.Option(None, "--stable-s", help="How long it must hold before the commit. [default: the fleet file's]")
LEASE = typer.Option(60.0, "--lease-s", help="The services revert by themselves when this command is silent for so long.")
HOLD = typer.Option(None, "--hold-s", help="How long a held rollout waits for resume or abort. [default: the fleet file's, 3600]")
INCIDENT = typer.Option(False, "--incident", help="The server is down or wedged: go by the recorded baseline instead of a live one.")
REASON = typer.Option("", "--reason", help="Why; kept in the journal.")
EXPECT = typer.Option(
    [], "--expect-change", metavar="NAME=CLASS",
    help='A caller of the fleet file whose answers are meant to change, and to what: text, json, tool_call, "http 400". Repeatable.',
)  # fmt: skip
REVIEW = typer.Option("", "--review-by", metavar="YYYY-MM-DD", help="By when somebody must have looked at --expect-change again.")
ALLOWANCE = typer.Option(
    None, "--throughput-allowance", metavar="PCT",
    help="Measure speed before and after; a loss above this fails. Off unless given here or in the fleet file: it is a load beside "
    "live traffic, takes minutes, and says nothing on a machine that is busy with others.",
)  # fmt: skip
ATTENDED = typer.Option(
    False, "--attended", help="Somebody watches: hold what cannot be told, instead of reverting. [default: on a terminal]"
)


def _desk(session: Session, path: str, deployment: str) -> Desk:
    return Desk(fleet.load(path), deployment, session.env, Waiter(talk=session.talk))


def _wish(
    desk: Desk, session: Session, set_: list[str], unset: list[str], env: list[str], boot: float | None, stable: float | None,
    lease: float, hold: float | None, incident: bool, reason: str, attended: bool, expect: list[str], review: str,
    allowance: float | None,
) -> Wish:  # fmt: skip
    deployment = desk.deployment
    boot_s = boot or deployment.boot_deadline_s
    times = Times(boot_s=boot_s, stable_s=deployment.stable_s if stable is None else stable, answer_s=min(120.0, boot_s),
                  lease_s=lease, hold_s=hold or deployment.hold_s)  # fmt: skip
    try:
        edits = (*(flags.parse_unset(text) for text in unset), *(flags.parse_set(text) for text in set_))
        declared = agreed.parse(expect, review, deployment.caller)
        return Wish(edits, dict(flags.parse_env(text) for text in env), times, incident, attended or session.attended, reason, declared,
                    allowance)  # fmt: skip
    except (flags.EditError, agreed.AgreedError) as error:
        raise typer.BadParameter(str(error)) from error


def _plan_text(made: Plan, desk: Desk) -> str:
    times = made.times
    digest = f"\nconfiguration {made.digest_before[:12]} -> {made.digest_after[:12]}" if made.digest_after else ""
    seen = survey.told(made, desk.survey.unagreed(made))
    callers = f"\n{seen}" if seen else ""
    same = "\nnote: the declared configuration stays the same" if made.digest_after and made.digest_after == made.digest_before else ""
    return (
        f"{made.diff()}{digest}{same}{callers}\nevery service of the group stops and starts once; boot within {times.boot_s:g} s, "
        f"steady for {times.stable_s:g} s; silence of {times.lease_s:g} s reverts\nplan {made.digest}"
    )


def _plan_data(made: Plan) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(made)
    return {**data, "digest": made.digest, "diff": made.diff()}


def _finished(session: Session, command: str, result: Result, as_json: bool) -> None:
    errors = () if result.exit_code is ExitCode.DONE else (Problem(str(result.state), result.why, where=result.deployment),)
    session.show(Answer(command, result.data(), result.text(), result.exit_code, errors), as_json=as_json)


@app.command()
def plan(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, set_: list[str] = SET, unset: list[str] = UNSET,
    env: list[str] = ENV, boot: float | None = BOOT, stable: float | None = STABLE, lease: float = LEASE, hold: float | None = HOLD,
    incident: bool = INCIDENT, reason: str = REASON, expect: list[str] = EXPECT, review: str = REVIEW, allowance: float | None = ALLOWANCE,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Show what a change would do, for every service. Touches nothing."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        made = desk.plan(_wish(desk, session, set_, unset, env, boot, stable, lease, hold, incident, reason, False, expect, review,
                               allowance))  # fmt: skip
        session.show(Answer("rollout plan", _plan_data(made), _plan_text(made, desk)), as_json=as_json)


@app.command()
def apply(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, set_: list[str] = SET, unset: list[str] = UNSET,
    env: list[str] = ENV, boot: float | None = BOOT, stable: float | None = STABLE, lease: float = LEASE, hold: float | None = HOLD,
    incident: bool = INCIDENT, reason: str = REASON, attended: bool = ATTENDED, expect: list[str] = EXPECT, review: str = REVIEW,
    allowance: float | None = ALLOWANCE,
    yes: bool = typer.Option(False, "--yes", help="Do not ask."), dry_run: bool = typer.Option(False, "-n", "--dry-run", help="Only plan."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Carry a change out: change, restart, prove, watch, commit. Whatever fails is reverted, and the revert proven.

    Exit status: 0 committed, 3 reverted, 4 stuck (look now), 5 held, 6 locked, 7 unreachable, 9 the baseline is not green.
    """
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        wish = _wish(desk, session, set_, unset, env, boot, stable, lease, hold, incident, reason, attended, expect, review, allowance)
        if dry_run:
            made = desk.plan(wish)
            session.show(Answer("rollout apply", _plan_data(made), _plan_text(made, desk)), as_json=as_json)
            return

        def agree(made: Plan) -> bool:
            session.talk(_plan_text(made, desk))
            return yes or (session.attended and typer.confirm("apply this?", err=True))

        _finished(session, "rollout apply", desk.apply(wish, agree), as_json)


@app.command()
def resume(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, attended: bool = ATTENDED, as_json: bool = JSON
) -> None:
    """Carry on with a rollout that was held or cut off."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        _finished(session, "rollout resume", desk.resume(attended=attended or session.attended), as_json)


@app.command()
def abort(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, reason: str = REASON, as_json: bool = JSON
) -> None:
    """Go back to the last verified configuration, and prove it."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        _finished(session, "rollout abort", desk.abort(reason), as_json)


@app.command()
def verify(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON) -> None:
    """Prove what runs now, and record it as what a revert goes back to."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        found, checks = desk.verify()
    data = {"verified": msgspec.to_builtins(found), "checks": msgspec.to_builtins(checks)}
    text = "\n".join(f"{check.name:<12} {check.outcome:<12} {check.evidence}" for check in checks)
    code = ExitCode.DONE if found else ExitCode.FOUND
    session.show(Answer("rollout verify", data, text, code), as_json=as_json)


@app.command()
def status(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON) -> None:
    """Say what each service runs, what holds it, and how the last rollout ended."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        data = desk.status()
    lines = []
    for service in data["services"]:
        held = f", held by {service['held_by']}" if service["held_by"] else ""
        changed = "trial" if service["trial"] else "committed override" if service["committed"] else "as defined"
        lines.append(f"{service['name']}: {service['state']}, invocation {service['invocation_id'][:8] or '-'}, {changed}{held}")
    last, known = data["last"], data["verified"]
    lines.append(f"last rollout: {last['id']} {last['state']} ({' '.join(last['edits'])})" if last else "no rollout yet")
    lines.append(
        f"revert target: {known['digest'][:12] or 'recorded'}, verified {known['at_utc']}" if known else "no verified configuration"
    )
    session.show(Answer("rollout status", data, "\n".join(lines)), as_json=as_json)


@app.command()
def history(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, as_json: bool = JSON) -> None:
    """List the rollouts of a deployment: who did what, why, and how it ended."""
    session: Session = context.obj
    with _desk(session, fleet_path, deployment) as desk:
        found = desk.history()
    lines = [
        f"{r['id']}  {r['state']:<10} {r['by']:<10} {' '.join(r['edits'])}{'  # ' + r['reason'] if r['reason'] else ''}" for r in found
    ]
    session.show(Answer("rollout history", found, "\n".join(lines)), as_json=as_json)


@app.command("deadman-page", hidden=True)
def deadman_page(context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, rollout: str = typer.Option("")) -> None:
    """Run by a dead-man after it reverted: tell the people of the fleet file."""
    session: Session = context.obj
    found = fleet.load(Path(fleet_path))
    page = UrlPager(found.page.urls).page(
        f"{deployment}: rollout reverted by the dead-man",
        "Its operator fell silent, so the services went back to the last committed configuration. Prove it: opsctl rollout resume", rollout,
    )  # fmt: skip
    code = ExitCode.DONE if page.sent else ExitCode.INTERNAL
    session.show(Answer("rollout deadman-page", {"page_sent": page.sent, "reason": page.reason}, exit_code=code), as_json=False)
