"""``opsctl repro run|list|show``: the incident's experiments, and a site's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from monitors import fleet, keyfile
from monitors.exit_codes import ExitCode
from opsctl import eventloop, wholefile
from opsctl.answer import Answer, Problem, Session
from opsctl.library import NotFound, Shelf
from opsctl.load.address import address
from opsctl.load.client import NoServer
from opsctl.playbooks import lint
from opsctl.playbooks.document import PlaybookError
from opsctl.playbooks.schema import Playbook, Step
from opsctl.repro import conclusion
from opsctl.repro.conclusion import Run
from opsctl.repro.experiment import Experiment
from opsctl.repro.run import NotSteady, Site, repeat

app = typer.Typer(no_args_is_help=True, help="Does the fault come? Experiments with held concurrency, counted.")

NAME = typer.Argument(help="An experiment: C, A, B, S, P, a playbook's name, or a file.")
FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
OUT = typer.Option(None, "--out", help="Also write the results here, as JSON.")
BUNDLES = typer.Option(None, "--bundle-dir", help="Where the evidence of a reproduction goes. [default: where the fleet file says]")


@app.command("list")
def list_(context: typer.Context, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """List the experiments."""
    session: Session = context.obj
    found = []
    for path in Shelf.of("playbooks", ".yaml", session.env, fleet_path).all().values():
        try:
            playbook = lint.read(path).playbook
        except PlaybookError:
            continue  # `opsctl playbook lint` says what is wrong with it
        steps = [step for step in playbook.method if step.repro is not None]
        if steps:
            found.append({"name": playbook.name, "letter": _letter(playbook.name), "summary": playbook.summary, "path": str(path)})
    lines = [f"{one['letter']:<2} {one['name']:<24} {one['summary']}" for one in found]
    session.show(Answer("repro list", found, "\n".join(lines)), as_json=as_json)


@app.command()
def show(context: typer.Context, name: str = NAME, fleet_path: str = FLEET, as_json: bool = JSON) -> None:
    """Show what an experiment does and when a run of it counts."""
    session: Session = context.obj
    playbook, step, experiment = _find(session, name, fleet_path, "")
    data = {"name": playbook.name, "summary": playbook.summary, "step": step.name, "experiment": experiment.model_dump(mode="json")}
    session.show(Answer("repro show", data, f"{playbook.name}: {playbook.summary}\n" + "\n".join(_lines(experiment))), as_json=as_json)


@app.command()
def run(
    context: typer.Context, name: str = NAME, fleet_path: str = FLEET, deployment: str = DEPLOYMENT,
    url: str = typer.Option("", "--url", callback=address, help="A server without a fleet file: then its streams alone tell."),
    api_key_file: Path | None = typer.Option(None, "--api-key-file", help="A file with the API key."),  # noqa: B008
    runs: int = typer.Option(0, "--runs", min=0, max=1000, help="So many instead of what the experiment says."),
    seconds: float = typer.Option(0.0, "--seconds", min=0, max=86400, help="So long a run instead of what the experiment says."),
    stall_s: float = typer.Option(0.0, "--stall-s", min=0, max=86400, help="Silence that is the fault, instead of what it says."),
    step: str = typer.Option("", "--step", help="Of a playbook with several experiments."),
    seed: int = typer.Option(0, "--seed", help="Of the prompts."),
    bundle_dir: Path | None = BUNDLES, out: Path | None = OUT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Run an experiment. Exit 9: reproduced, or failed otherwise; 5: inconclusive, or not begun; 0: not reproduced in so many runs.

    It sends the very requests that are suspected of wedging the server: mind who else uses it.
    """
    session: Session = context.obj
    playbook, _, experiment = _find(session, name, "" if url else fleet_path, step)
    changed = {"runs": runs, "seconds": seconds, "stall_s": stall_s}
    experiment = experiment.model_copy(update={key: value for key, value in changed.items() if value})
    site = _site(session, url, api_key_file, fleet_path, deployment, bundle_dir)
    others = [one.name for one in playbook.method if one.repro is None]
    if others:
        session.talk(f"only the experiment of {playbook.name} is run; its other steps ({', '.join(others)}) are done by: "
                     f"opsctl playbook run {playbook.name}")  # fmt: skip
    try:
        found, broke = eventloop.run(repeat(experiment, site, seed, session.talk))
    except NoServer as error:
        session.show(Answer("repro run", exit_code=ExitCode.UNREACHABLE, errors=(Problem("unreachable", str(error)),)), as_json=as_json)
        return
    except NotSteady as error:
        problem = Problem("not steady", str(error), remedy="bring the server back first: nothing that came now would be a result")
        session.show(Answer("repro run", exit_code=ExitCode.HELD, errors=(problem,)), as_json=as_json)
        return
    data = conclusion.document(playbook.name, experiment, found)
    whole, sentence = conclusion.conclude(experiment, found)
    code, problems = conclusion.EXIT[whole], tuple(Problem("not kept", note) for one in found for note in one.notes)
    if broke is not None:
        which = f"run {len(found) + 1} could not begin: {broke}"
        problems = (*problems, Problem("broken off", which, remedy="the server went away between two runs: look at it"))
        code = code or (ExitCode.UNREACHABLE if isinstance(broke, NoServer) else ExitCode.HELD)
    try:
        if out is not None:
            wholefile.write(out, (json.dumps(data, indent=1) + "\n").encode())
    except OSError as error:
        code, problems = code or ExitCode.INTERNAL, (*problems, Problem("not written", str(error.strerror), where=str(out)))
    session.show(Answer("repro run", data, f"{_table(experiment, found)}\n\n{sentence}", code, problems), as_json=as_json)


def _find(session: Session, name: str, fleet_path: str, step: str) -> tuple[Playbook, Step, Experiment]:
    """Raises BadParameter and PlaybookError."""
    shelf = Shelf.of("playbooks", ".yaml", session.env, fleet_path)
    try:
        path = shelf.find(f"repro-{name.lower()}" if len(name) == 1 else name)
    except NotFound as error:
        raise typer.BadParameter(str(error)) from error
    playbook = lint.read(path).playbook
    for one in playbook.method:
        if one.repro is not None and step in ("", one.name):
            return playbook, one, one.repro
    raise typer.BadParameter(f"{path}: no step{' ' + step if step else ''} of it is an experiment (repro: ...)")


def _site(session: Session, url: str, api_key_file: Path | None, fleet_path: str, deployment: str, bundles: Path | None) -> Site:
    chosen = None if url else fleet.load(fleet_path).one(deployment)
    file = api_key_file if chosen is None else chosen.api_key_file
    try:
        key = keyfile.read(file) if file else ""
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from error
    if chosen is None:
        return Site(url, key)
    return Site(chosen.api, key, deployment=chosen, bundles=bundles or fleet.bundle_root(chosen, session.env))


def _letter(name: str) -> str:
    letter = name.removeprefix("repro-")
    return letter.upper() if len(letter) == 1 else ""


def _lines(experiment: Experiment) -> list[str]:
    agents, probes, overlap = experiment.agents, experiment.probes, experiment.overlap
    often = f"one each {probes.every_s:g} s" if probes.every_s else "one after another"
    lines = [
        f"  {experiment.runs} runs of {experiment.seconds:g} s",
        f"  loop: {agents.streams} agents, {agents.max_tokens} tokens a turn, context below {agents.context_tokens} tokens",
        f"  under suspicion: {'constrained' if probes.constrained else 'unconstrained'} requests, {probes.streams} at once, {often}, "
        f"expected: {probes.expect}",
    ]
    if experiment.prefills:
        lines.append(f"  beside them: {experiment.prefills.streams} long prefills at once, {experiment.prefills.prompt_tokens} tokens")
    if overlap.share:
        lines.append(f"  a run counts when {overlap.agents} agents decode beside a suspect for {overlap.share:.0%} of its time")
    return [*lines, f"  the fault: held work that gives nothing for {experiment.stall_s:g} s, or a server that is gone"]


def _table(experiment: Experiment, runs: Sequence[Run]) -> str:
    lines = []
    for number, found in enumerate(runs, 1):
        told, why = conclusion.outcome(experiment, found)
        share = "-" if found.overlap.share is None else f"{found.overlap.share:.0%}"
        lines.append(f"run {number}: {told}: {why}")
        lines.append(f"  {found.seconds:.1f} s; loop: {found.turns} turns, {_counts(found.turn_errors)}, {found.tokens_per_s:.1f} tok/s, "
                     f"longest context {found.most_context} tokens")  # fmt: skip
        done = "refused" if experiment.probes.refused else "answered"
        left = f"; {found.open} requests open at the end" if found.open else ""
        lines.append(f"  under suspicion: {found.expected} of {found.probes} {done}, {_counts(found.probe_errors)}{left}")
        if experiment.overlap.share:
            lines.append(f"  overlap {share} by {found.overlap.source}")
        for words, latency in (("refusals", found.refusals), ("refusals while a long prefill ran", found.refusals_beside_prefill),
                               ("answers", found.answers)):  # fmt: skip
            if latency is not None:
                lines.append(f"  {words}: {latency} ({latency.count})")
        if found.verdict:
            lines.append(f"  {found.verdict}, bundle {found.bundle}")
    return "\n".join(lines)


def _counts(errors: dict[str, Any]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in errors.items()) or "no error"
