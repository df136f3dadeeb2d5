"""``opsctl load run|sweep|ab|compare|plot``: bounded load on any OpenAI-compatible server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import typer

from monitors import keyfile
from monitors.exit_codes import ExitCode
from opsctl import eventloop
from opsctl.answer import Answer, Problem, Session
from opsctl.load import plot as drawing
from opsctl.load import results, shapes, sides, table
from opsctl.load.address import address
from opsctl.load.cell import Bounds, Level
from opsctl.load.client import NoServer
from opsctl.load.measure import Plan, measure
from opsctl.load.results import Results, ResultsError
from opsctl.load.shapes import PLAIN, Mix, ShapeError
from opsctl.load.sides import Place

app = typer.Typer(no_args_is_help=True, help="Ask a server much, within bounds, and say how it did. Any OpenAI-compatible one.")

_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 250)
_MOST_STREAMS = 1000

URL = typer.Option("http://127.0.0.1:30000", "--url", callback=address, help="The server.")
AGAINST = typer.Option("", "--against", callback=address, help="The other server's URL. [default: --url, where commands are given]")
MODEL = typer.Option("", "--model", help="The model's name. [default: the first that the server names]")
KEY_FILE = typer.Option(None, "--api-key-file", help="A file with the API key.")
SHAPES = typer.Option(None, "--shapes", help="What is sent: a TOML or YAML file of shapes. [default: 128 random tokens in, 64 out]")
SEED = typer.Option(0, "--seed", help="The same seed asks the same things at the same times.")
REPS = typer.Option(3, "--reps", min=1, max=100, help="Repetitions of everything: figures are medians with the least and the most.")
REQUEST_S = typer.Option(300.0, "--request-s", min=0.1, max=3600, help="A request without its whole answer by then has timed out.")
GRACE_S = typer.Option(60.0, "--grace-s", min=0, max=3600, help="What requests that are open at the end of a level may take more.")
OUT = typer.Option(None, "--out", help="Write the results file here; `compare` and `plot` read it.")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
SECONDS = typer.Option(60.0, "--duration-s", min=0.1, max=3600, help="No request of a level begins after that.")
CACHED = typer.Option(
    False, "--cached", help="Random prompts as the seed alone gives them: what an earlier run asked may be in the prefix cache."
)
WARMUP = typer.Option(2, "--warmup", min=1, max=1000, help="Requests before the first level that are not counted.")
LOG = typer.Option(None, "--log", help="What started commands say goes here.")
BOOT_S = typer.Option(300.0, "--boot-s", min=1, max=3600, help="How long a started command may take until it serves.")
LEVELS = typer.Option(",".join(map(str, _SWEEP)), "--streams", help="Streams at once, one level after another.")
EACH = typer.Option(4, "--requests-per-stream", min=1, max=1000, help="Requests of a level, by stream (the level has at least 8).")

BEFORE = typer.Argument(help="An earlier results file.")
AFTER = typer.Argument(help="A later one.")
FILE = typer.Argument(help="A results file.")
FOLDER = typer.Option(Path(), "--out", help="Folder for the drawings. [default: here]")


@app.command()
def run(
    context: typer.Context, url: str = URL,
    streams: int = typer.Option(8, "--streams", min=1, max=_MOST_STREAMS, help="Closed loop: so many at once."),
    rate: float = typer.Option(0.0, "--rate", min=0, max=10_000, help="Open loop: Poisson arrivals, so many a second."),
    most_open: int = typer.Option(_MOST_STREAMS, "--most-open", min=1, max=_MOST_STREAMS, help="Open loop: above it nothing is sent."),
    requests: int = typer.Option(64, "--requests", min=1, max=1_000_000, help="Requests of a repetition, at most."),
    duration_s: float = SECONDS, shape_file: Path | None = SHAPES, seed: int = SEED, reps: int = REPS, warmup: int = WARMUP,
    model: str = MODEL, api_key_file: Path | None = KEY_FILE, request_s: float = REQUEST_S, grace_s: float = GRACE_S,
    cached: bool = CACHED, out: Path | None = OUT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """One level: a closed loop of --streams, or Poisson arrivals at --rate."""
    bounds = Bounds(requests, duration_s, grace_s)
    level = Level(most_open if rate else streams, rate)
    place = Place("server", url, model, _key(api_key_file), request_s=request_s)
    fresh = _fresh(cached)
    _measure(
        context.obj,
        "load run",
        [place],
        lambda mix: Plan(mix, (level,), lambda _: bounds, reps, warmup, fresh),
        shape_file,
        seed,
        out,
        as_json,
    )


@app.command()
def sweep(
    context: typer.Context, url: str = URL, streams: str = LEVELS, requests_per_stream: int = EACH,
    duration_s: float = SECONDS, shape_file: Path | None = SHAPES, seed: int = SEED, reps: int = REPS, warmup: int = WARMUP,
    model: str = MODEL, api_key_file: Path | None = KEY_FILE, request_s: float = REQUEST_S, grace_s: float = GRACE_S,
    cached: bool = CACHED, out: Path | None = OUT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Closed loops of 1 to 250 streams."""
    levels = _levels(streams)
    place = Place("server", url, model, _key(api_key_file), request_s=request_s)

    def plan(mix: Mix) -> Plan:
        return Plan(mix, levels, _bounds(requests_per_stream, duration_s, grace_s), reps, warmup, _fresh(cached))

    _measure(context.obj, "load sweep", [place], plan, shape_file, seed, out, as_json)


@app.command()
def ab(
    context: typer.Context, url: str = URL,
    against: str = AGAINST,
    command: str = typer.Option("", "--command", help="Start this at --url for each repetition, and end it after."),
    against_command: str = typer.Option("", "--against-command", help="The same for the other: another configuration."),
    streams: str = typer.Option("1,8", "--streams", help="Levels, as for sweep."), requests_per_stream: int = EACH,
    duration_s: float = SECONDS, shape_file: Path | None = SHAPES, seed: int = SEED, reps: int = REPS, warmup: int = WARMUP,
    model: str = MODEL, api_key_file: Path | None = KEY_FILE, request_s: float = REQUEST_S, grace_s: float = GRACE_S,
    boot_s: float = BOOT_S, log: Path | None = LOG, cached: bool = CACHED, out: Path | None = OUT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Two servers, or two configurations of one, in turns: the same requests, and ratios pair by pair."""
    if not against and not (command and against_command):
        raise typer.BadParameter("name the other server by --against URL, or give both --command and --against-command")
    if (against or url) == url and bool(command) != bool(against_command):
        raise typer.BadParameter("one address and one command: which of the two sides would answer?")
    for name, line in (("--command", command), ("--against-command", against_command)):
        if wrong := sides.problem(line):
            raise typer.BadParameter(f"{name} {line}: {wrong}")
    levels, key = _levels(streams), _key(api_key_file)
    a = Place("A", url, model, key, command, boot_s, request_s)
    b = replace(a, name="B", url=against or url, command=against_command)

    def plan(mix: Mix) -> Plan:
        return Plan(mix, levels, _bounds(requests_per_stream, duration_s, grace_s), reps, warmup, _fresh(cached))

    _measure(context.obj, "load ab", [a, b], plan, shape_file, seed, out, as_json, log)


@app.command()
def compare(
    context: typer.Context, before: Path = BEFORE, after: Path = AFTER,
    force: bool = typer.Option(False, "--force", help="Compare across hosts, days or requests all the same; the table says so."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Hold one run against an earlier one. Refused where host, day or requests differ."""
    session: Session = context.obj
    try:
        one, two = results.read(before), results.read(after)
    except ResultsError as error:
        session.show(Answer("load compare", exit_code=ExitCode.USAGE, errors=(Problem("results", str(error)),)), as_json=as_json)
        return
    why = results.differs(one, two)
    if why and not force:
        problem = Problem(
            "not comparable", "; ".join(why), f"{before}, {after}", "take both on one host and day, or add --force and say so"
        )
        session.show(Answer("load compare", exit_code=ExitCode.USAGE, errors=(problem,)), as_json=as_json)
        return
    first, second = one.of(one.sides[0].name), two.of(two.sides[0].name)
    found = table.ratios(first, second, paired=False)
    if not found:
        problem = Problem("not comparable", "the two have no level in common", f"{before}, {after}")
        session.show(Answer("load compare", exit_code=ExitCode.USAGE, errors=(problem,)), as_json=as_json)
        return
    notes = [f"NOT COMPARABLE, forced: {text}" for text in why] + table.left_out(one, two)
    text = "\n".join([*notes, table.of_ratios(found, "before", "after")])
    session.show(
        Answer("load compare", {"forced": list(why), "notes": notes, "ratios": [r.to_json() for r in found]}, text), as_json=as_json
    )


@app.command()
def plot(
    context: typer.Context, file: Path = FILE, folder: Path = FOLDER, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Draw results as SVG, and as PNG where matplotlib is installed."""
    session: Session = context.obj
    try:
        made = drawing.write(results.read(file), folder, file.stem)
    except ResultsError as error:
        session.show(Answer("load plot", exit_code=ExitCode.USAGE, errors=(Problem("results", str(error)),)), as_json=as_json)
        return
    session.show(Answer("load plot", {"files": [str(path) for path in made]}, "\n".join(map(str, made))), as_json=as_json)


def _measure(
    session: Session, command: str, places: Sequence[Place], make: Any, shape_file: Path | None, seed: int, out: Path | None,
    as_json: bool, log: Path | None = None,
) -> None:  # fmt: skip
    try:
        plan: Plan = make(Mix(shapes.load(shape_file) if shape_file else (PLAIN,), seed))
        session.talk(f"at most {plan.longest_s(len(places)):.0f} s, {len(plan.levels)} levels, {plan.reps} repetitions")
        if out is not None:
            results.can_write(out)  # before an hour of load, not after it
        found = eventloop.run(measure(plan, places, session.env, session.talk, log))
    except (ShapeError, ResultsError) as error:
        session.show(Answer(command, exit_code=ExitCode.USAGE, errors=(Problem("load", str(error)),)), as_json=as_json)
        return
    except NoServer as error:
        session.show(Answer(command, exit_code=ExitCode.UNREACHABLE, errors=(Problem("unreachable", str(error)),)), as_json=as_json)
        return
    lost = ""
    try:
        if out is not None:
            results.write(out, found)
    except ResultsError as error:
        lost = str(error)
    session.show(_told(command, found, out, lost), as_json=as_json)


def _told(command: str, found: Results, out: Path | None, lost: str) -> Answer:
    """``lost``: why the results file could not be written.

    Exit 9 when not a single request came as expected: then the figures say nothing."""
    data: dict[str, Any] = msgspec.to_builtins(found)
    text = table.of_run(found)
    if len(found.sides) == 2:
        a, b = (side.name for side in found.sides)
        pairs = table.ratios(found.of(a), found.of(b), paired=True)
        data["ratios"] = [pair.to_json() for pair in pairs]
        text += "\n\n" + table.of_ratios(pairs, a, b)
    if out is not None and not lost:
        text += f"\n\nresults {out}"
    silent = [side.name for side in found.sides if not any(rep.ok for cell in found.of(side.name).values() for rep in cell.reps)]
    problems = tuple(Problem("no answer", "not one request came as expected; see the errors", name) for name in silent)
    code = ExitCode.FOUND if silent else ExitCode.DONE
    if lost:
        problems, code = (*problems, Problem("not written", lost)), code or ExitCode.INTERNAL
    return Answer(command, data, text, code, problems)


def _fresh(cached: bool) -> str:
    return "" if cached else secrets.token_hex(4)


def _levels(text: str) -> tuple[Level, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and 1 <= int(word) <= _MOST_STREAMS for word in words):
        raise typer.BadParameter(f"--streams {text}: write numbers from 1 to {_MOST_STREAMS}, such as 1,4,16")
    return tuple(Level(streams) for streams in dict.fromkeys(int(word) for word in words))


def _bounds(each: int, seconds: float, grace_s: float) -> Any:
    return lambda level: Bounds(max(8, each * level.streams), seconds, grace_s)


def _key(path: Path | None) -> str:
    try:
        return keyfile.read(path) if path else ""
    except OSError as error:
        raise typer.BadParameter(f"--api-key-file {path}: {error.strerror}") from error
