"""``opsctl callers``: the kinds of clients of a deployment, recorded at rest and watched after a change."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time

import typer

from monitors import engines, fleet
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session
from opsctl.callers import matrix
from opsctl.callers.watch import CallerWatch, Seen
from opsctl.rollout import before, target
from opsctl.rollout.before import Recorded
from opsctl.rollout.pager import UrlPager
from opsctl.rollout.probe import Api
from opsctl.rollout.survey import Survey

app = typer.Typer(no_args_is_help=True, help="The kinds of clients of a deployment: what they get, and whether they get it here.")

FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
_QUIET_S = 1.0
_SAY_EVERY_S = 60.0
_YEAR_S = 366 * 86_400.0


@app.command()
def record(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT,
    never_live: bool = typer.Option(False, "--never-live", help="Also the requests that must not be sent beside live traffic. Refused "
                                                                 "while somebody else is served."),
    deadline_s: float = typer.Option(120.0, "--deadline-s", min=0.1, max=3600.0, help="What one answer may take, in seconds."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Ask each caller's request once and keep the class of its answer, for rollouts to compare with."""
    session: Session = context.obj
    found = fleet.load(fleet_path)
    one = found.one(deployment)
    group = target.of(one, found.path, session.env)
    with contextlib.closing(Api(group.api, group.api_key)) as api:
        if never_live and _busy(api, one.engine):
            problem = Problem("busy", "somebody else is being served, and a never-live request is dangerous beside others",
                              where=one.name, remedy="drain the deployment first, or leave --never-live out")  # fmt: skip
            session.show(Answer("callers record", exit_code=ExitCode.USAGE, errors=(problem,)), as_json=as_json)
            return
        callers = [caller for caller in one.caller if never_live or matrix.sent(caller)]
        answers = {
            caller.name: matrix.ask_one(caller, lambda request: api.ask(request, deadline_s), lambda: secrets.token_hex(6))
            for caller in callers
        }
        digest = str(api.server_info().get("config_digest", "")) if group.speaks_digest else ""
    at_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    folder = fleet.state_root(session.env) / "rollouts" / one.name
    before.keep(folder, {name: Recorded(found.kind, at_utc, digest) for name, found in answers.items()}, {})
    left = [caller.name for caller in one.caller if caller.name not in answers]
    lines = [f"{name}: {found.kind}{f' ({found.why})' if found.why else ''}" for name, found in answers.items()]
    lines += [f"{name}: not sent (never-live)" for name in left]
    data = {"recorded": {name: vars(found) for name, found in answers.items()}, "not_sent": left}
    session.show(Answer("callers record", data, "\n".join(lines) or "the fleet file names no callers"), as_json=as_json)


def _busy(api: Api, engine: str) -> bool:
    """Whether tokens are made for somebody."""
    names = tuple(engines.load(engine).metrics.progress)
    first = api.generated_tokens(names)
    time.sleep(_QUIET_S)
    return api.generated_tokens(names) != first


@app.command()
def watch(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT,
    for_s: float = typer.Option(0.0, "--for", min=0.0, max=_YEAR_S, show_default=False,
                                   help="Leave after so many seconds. [default: never]"),
    window_s: float = typer.Option(600.0, "--window-s", min=1.0, max=_YEAR_S,
                                      help="Over how long the requests that come are held against the rate of before."),
    every_s: float = typer.Option(15.0, "--every-s", min=0.05, max=_YEAR_S, help="How often the access log is read."),
    probe_s: float = typer.Option(60.0, "--probe-every-s", min=0.0, max=_YEAR_S,
                                     help="How often a nonce goes through each client's own path. 0: never."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Watch that clients still ask here, at the rates recorded before the last rollout, and that their own path leads here.

    Exit status 9, and a page, when a client has all but stopped asking or is answered by somebody else; 0 after --for. An
    agreed change whose review is past pages too, and does not end the watch.
    """
    session: Session = context.obj
    found = fleet.load(fleet_path)
    one = found.one(deployment)
    group = target.of(one, found.path, session.env)
    folder = fleet.state_root(session.env) / "rollouts" / one.name
    last, pager = before.read(folder), UrlPager(found.page.urls)
    if last is None:
        problem = Problem("no_record", f"nothing was recorded of {one.name}", remedy="opsctl rollout verify, while it is well")
        session.show(Answer("callers watch", exit_code=ExitCode.USAGE, errors=(problem,)), as_json=as_json)
        return
    overdue = Survey(one, folder).overdue(None, datetime.datetime.now(datetime.UTC).date())
    page_sent = None
    if overdue:
        page_sent = pager.page(f"{one.name}: an agreed change is to be reviewed", "\n".join(overdue), f"callers {one.name}").sent
        session.talk(f"to be reviewed: {'; '.join(overdue)}")
    session.talk(f"watching {', '.join(f'{who} {rate * 60:.1f}/min' for who, rate in last.rates.per_s.items()) or 'no client with a rate'}")
    with contextlib.closing(Api(group.api, group.api_key)) as api:
        watching = CallerWatch(one, group, api, last.rates, time, window_s, probe_s)
        seen = _until_something(session, watching, for_s, every_s)
    if seen.problems:
        page_sent = pager.page(f"{one.name}: clients are served elsewhere", "\n".join(seen.problems), f"callers {one.name}").sent
    names = watching.names()
    data = {
        "seconds": round(seen.seconds, 1), "overdue": list(overdue), "page_sent": page_sent,
        "callers": [{"name": names.get(who, who), "before_per_s": rate, "seen": seen.counted.get(who, 0)}
                    for who, rate in last.rates.per_s.items()],
        "paths": {led.caller: led.kind for led in seen.led}, "verdict": "hosted_fallback" if seen.problems else "healthy",
    }  # fmt: skip
    code = ExitCode.FOUND if seen.problems else ExitCode.INTERNAL if page_sent is False else ExitCode.DONE
    text = "\n".join(seen.problems) or f"{sum(seen.counted.values())} requests in {seen.seconds:.0f} s; nobody has fallen silent"
    session.show(Answer("callers watch", data, text, code), as_json=as_json)


def _until_something(session: Session, watching: CallerWatch, for_s: float, every_s: float) -> Seen:
    begun = said = time.monotonic()
    while True:
        seen = watching.look()
        now = time.monotonic()
        if seen.problems or (for_s and now - begun >= for_s):
            return seen
        if now - said >= _SAY_EVERY_S:
            said = now
            left = f", {for_s - (now - begun):.0f} s left" if for_s else ""
            session.talk(f"{sum(seen.counted.values())} requests in the last {seen.seconds:.0f} s{left}")
        time.sleep(min(every_s, max(0.0, for_s - (now - begun))) if for_s else every_s)
