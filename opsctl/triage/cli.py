"""``opsctl triage``: what is the matter, read-only, under one deadline; live, or of a folder of evidence."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import typer

from monitors import casefolder, fleet
from monitors.capture import archive
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session
from opsctl.triage import live, picture, render
from opsctl.triage.picture import Picture


def triage(
    context: typer.Context,
    folder: Path | None = typer.Argument(None, help="A case folder, or a bundle or its .tar.zst, instead of a live deployment."),  # noqa: B008
    fleet_path: str = typer.Option("fleet.toml", "--fleet", help="The fleet file."),
    deployment: str = typer.Option("", "--deployment", help="Which deployment. [default: the only one]"),
    deadline_s: float = typer.Option(10.0, "--deadline", min=2.0, max=300.0, help="The answer is there by then, in seconds."),
    save: Path | None = typer.Option(None, "--save", help="Keep the evidence as a bundle in this folder."),  # noqa: B008
    fail_on_verdict: bool = typer.Option(False, "--fail-on-verdict", help="Exit 9 when a wedge, a crash or corruption is found."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON envelope."),
) -> None:
    """Say what is the matter: states, last batches, stacks, flags, verdicts. Changes nothing and asks for no token."""
    session: Session = context.obj
    try:
        if folder is not None:
            found = _recorded(folder)
        else:
            one = fleet.load(fleet_path).one(deployment)
            found = live.triage(one, fleet_path, session.env, deadline_s=deadline_s, save=save, say=lambda _: None)
    except casefolder.CaseError as error:
        session.show(Answer("triage", exit_code=ExitCode.USAGE, errors=(Problem("case", str(error)),)), as_json=as_json)
        return
    except live.Unreachable as error:
        problem = Problem(
            "unreachable", str(error), where=fleet_path, remedy="is it the right fleet file, can this machine reach the nodes?"
        )
        session.show(Answer("triage", exit_code=ExitCode.UNREACHABLE, errors=(problem,)), as_json=as_json)
        return
    code = ExitCode.FOUND if fail_on_verdict and (found.alarms or found.down) else ExitCode.DONE
    colour = getattr(session.stdout, "isatty", lambda: False)() and not session.env.get("NO_COLOR")
    session.show(Answer("triage", found.to_json(), render.text(found, colour=colour), code), as_json=as_json)


def _recorded(path: Path) -> Picture:
    began = time.monotonic()
    with archive.opened(path) as folder:
        return replace(picture.of_folder(folder), source=str(path), seconds=time.monotonic() - began)
