"""``opsctl demo``: the incident, from wedge to verified fix, on this machine."""

from __future__ import annotations

import typer

from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session
from opsctl.demo.story import play, table
from opsctl.staging.waiting import StageError


def demo(
    context: typer.Context,
    model: str = typer.Option("", "--model", help="Hugging Face folder to serve. [default: the default model]"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON envelope; the story goes to standard error."),
) -> None:
    """Play the incident: a served model wedges, is captured, a hasty change reverts itself, the fix is proven."""
    session: Session = context.obj
    try:
        story = play(session.env, session.talk, model)
    except StageError as error:
        problem = Problem("demo", str(error), remedy="the logs are in the folder named at the start")
        session.show(Answer("demo", exit_code=ExitCode.INTERNAL, errors=(problem,)), as_json=as_json)
        return
    session.show(Answer("demo", {"moments_s": story.moments, **story.facts}, table(story)), as_json=as_json)
