"""``hang-monitor``: watch, replay, status, version. The only file here that prints: data on stdout, talk on stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from monitors import casefolder, daemon, finite, fleet, scoreboard, silences
from monitors import doctor as examining
from monitors import page as paging
from monitors.capture.manifest import utc
from monitors.exit_codes import ExitCode
from monitors.judge.progress import Limits
from monitors.judge.verdict import Verdict
from monitors.liveness import Liveness
from monitors.observe import web
from monitors.packaging import unit as packaged
from monitors.sdnotify import Notifier
from monitors.status import StatusServer

app = typer.Typer(name="hang-monitor", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Watches LLM serving deployments, captures the evidence of a wedge and pages.")  # fmt: skip


@app.callback(invoke_without_command=True)
def _program(
    shows_version: Annotated[bool, typer.Option("--version", "-V", help="print which lastbatch this is", is_eager=True)] = False,
) -> None:
    if shows_version:
        print(f"hang-monitor {_version()}")
        raise typer.Exit


@app.command()
def run(
    fleet_file: Annotated[Path, typer.Option("--fleet", help="the fleet file")],
    deployment: Annotated[list[str] | None, typer.Option("--deployment", help="watch this one (repeatable); default: all")] = None,
    stall_s: Annotated[
        float | None,
        typer.Option("--stall-s", min=0.001, help="a fixed stall time [s]; default: by the server's own step times, 4 s on black boxes"),
    ] = None,
    poll_s: Annotated[float, typer.Option("--poll-s", min=0.001, help="time between two looks [s]")] = 0.5,
    state_dir: Annotated[Path | None, typer.Option("--state-dir", help="what is open and paged is kept here")] = None,
    bundle_dir: Annotated[Path | None, typer.Option("--bundle-dir", help="bundles go here instead of where the fleet file says")] = None,
    native: Annotated[bool, typer.Option("--native", help="also take native stacks, which pause every process")] = False,
    status_port: Annotated[
        int | None,
        typer.Option("--status-port", min=0, max=65535, help="serve JSON and Prometheus metrics on this loopback port; 0: a free one"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON event a line on stdout")] = False,
) -> None:
    """Watch until SIGTERM or Ctrl-C."""
    try:
        whole = fleet.load(fleet_file)
        chosen = [whole.one(name) for name in deployment] if deployment else list(whole.deployment.values())
    except fleet.FleetError as error:
        _fail(str(error))
    stop, interrupted = threading.Event(), threading.Event()
    events: Counter[str] = Counter()
    lock = threading.Lock()
    told = sys.stdout if as_json else sys.stderr

    def emit(event: dict[str, Any]) -> None:
        with lock:
            events[event["event"]] += 1
            try:
                print(json.dumps(event) if as_json else _line(event), file=told, flush=True)
            except BrokenPipeError:
                # Whoever read the events has gone. The watch, its bundles and its pages go on without.
                os.dup2(os.open(os.devnull, os.O_WRONLY), told.fileno())

    def on_signal(number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            interrupted.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    watches: list[daemon.Watch] = []
    server = None
    if status_port is not None:
        try:
            server = StatusServer(status_port, lambda: [watch.status for watch in watches], events)
        except OSError as error:
            _fail(f"--status-port: {status_port}: {error.strerror}")
        print(f"status on http://127.0.0.1:{server.port}/", file=sys.stderr, flush=True)
    options = daemon.Options(Limits(stall_s), poll_s, state_dir, bundle_dir, native)
    # The watches run in threads of their own: the main thread must stay free for signals.
    worker = threading.Thread(target=daemon.run, args=(whole, chosen, options, emit, stop, watches))
    worker.start()
    alive = Liveness(Notifier(), whole.heartbeat, lambda event: emit({"utc": utc(), **event}))
    while worker.is_alive():
        worker.join(0.5)
        if stop.is_set():
            alive.stopping()
        else:
            alive.turn([watch.status for watch in watches])
    if server is not None:
        server.close()
    raise typer.Exit(ExitCode.INTERRUPTED if interrupted.is_set() else ExitCode.DONE)


@app.command()
def replay(
    folder: Annotated[Path | None, typer.Argument(help="a case folder or a bundle")] = None,
    root: Annotated[
        Path | None, typer.Option("--all", help="judge every case under this folder and hold it against its case.yaml; exit 9 if one fails")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the verdict as one JSON object")] = False,
    fail_on_verdict: Annotated[bool, typer.Option("--fail-on-verdict", help="exit 9 when a wedge, a crash or corruption is found")] = False,
) -> None:
    """Judge recorded evidence by the same rules as a live server."""
    if (folder is None) == (root is None):
        _fail("give a case folder, or --all with a folder of cases")
    try:
        if root is not None:
            rows = scoreboard.run(root)
            text = json.dumps(scoreboard.to_json(rows), indent=2) if as_json else f"{scoreboard.table(rows)}\n\n{scoreboard.scores(rows)}"
            print(text)
            raise typer.Exit(ExitCode.DONE if all(row.passed for row in rows) else ExitCode.FOUND)
        assert folder is not None
        verdict = casefolder.judge(folder)
    except (casefolder.CaseError, scoreboard.ExpectationError) as error:
        _fail(str(error))
    print(json.dumps(verdict.to_json(), indent=2) if as_json else _told(verdict))
    raise typer.Exit(ExitCode.FOUND if fail_on_verdict and verdict.verdict.is_alarm else ExitCode.DONE)


@app.command()
def doctor(
    fleet_file: Annotated[Path, typer.Option("--fleet", help="the fleet file")],
    deployment: Annotated[str, typer.Option("--deployment", help="only this one; default: all")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="the proofs as JSON")] = False,
) -> None:
    """Prove now what a capture will need on every node; exit 9 when something is missing."""
    try:
        whole = fleet.load(fleet_file)
        chosen = [whole.one(deployment)] if deployment else list(whole.deployment.values())
    except fleet.FleetError as error:
        _fail(str(error))
    found = {one.name: examining.examine(whole, one) for one in chosen}
    if as_json:
        print(json.dumps({name: [proof.to_json() for proof in proofs] for name, proofs in found.items()}, indent=1))
    else:
        print("\n\n".join(f"{name}\n{examining.table(proofs)}" for name, proofs in found.items()))
    failed = any(proof.ok is False for proofs in found.values() for proof in proofs)
    raise typer.Exit(ExitCode.FOUND if failed else ExitCode.DONE)


@app.command("page")
def page_test(
    fleet_file: Annotated[Path, typer.Option("--fleet", help="the fleet file")],
    test: Annotated[bool, typer.Option("--test", help="send one page that says it is a test")] = False,
) -> None:
    """Send a test page to everybody that the fleet file names."""
    if not test:
        _fail("only --test is known: the monitor sends the others")
    try:
        urls = fleet.load(fleet_file).page.urls
    except fleet.FleetError as error:
        _fail(str(error))
    sent = paging.send(urls, "hang-monitor: test", f"This is a test of the pager from {os.uname().nodename}. Nothing is wrong.")
    print(json.dumps({"page_sent": sent.sent, "reason": sent.reason}))
    raise typer.Exit(ExitCode.DONE if sent.sent and not sent.reason else ExitCode.INTERNAL)


@app.command()
def silence(
    state_dir: Annotated[Path, typer.Option("--state-dir", help="the one that `run` was given")],
    for_s: Annotated[float, typer.Option("--for-s", min=0.0, help="how long [s]; 0 ends those that match")] = 3600.0,
    deployment: Annotated[str, typer.Option("--deployment", help="name or pattern")] = "*",
    verdict: Annotated[str, typer.Option("--verdict", help="class or pattern, e.g. hang_*")] = "*",
    why: Annotated[str, typer.Option("--why", help="kept beside it")] = "",
) -> None:
    """Page nobody for a while; evidence is taken all the same."""
    path, now = state_dir / "silences.json", time.time()
    kept = [one for one in silences.load(path) if (one.deployment, one.verdict) != (deployment, verdict)]
    if for_s > 0:
        kept.append(silences.Silence(deployment, verdict, now + for_s, os.environ.get("SUDO_USER") or os.environ.get("USER", "?"), why))
    try:
        silences.save(path, kept, now)
    except OSError as error:
        _fail(f"{path}: {error.strerror}", ExitCode.INTERNAL)
    for one in silences.load(path):
        print(f"{one.deployment} {one.verdict} until {utc(one.until_unix_s)} by {one.who}: {one.why}")


@app.command()
def ack(
    deployment: Annotated[str, typer.Argument(help="whose open incident you take")],
    state_dir: Annotated[Path, typer.Option("--state-dir", help="the one that `run` was given")],
) -> None:
    """Take an incident: it is not paged again."""
    path = state_dir / "acknowledged.json"
    try:
        silences.acknowledge(path, deployment, os.environ.get("SUDO_USER") or os.environ.get("USER", "?"), time.time())
    except OSError as error:
        _fail(f"{path}: {error.strerror}", ExitCode.INTERNAL)


@app.command()
def unit(
    fleet_file: Annotated[Path, typer.Option("--fleet", help="the fleet file that the unit names")] = Path("/etc/lastbatch/fleet.toml"),
) -> None:
    """Print the systemd unit of the monitor: this machine's paths, and what the fleet file's on_wedge and bundle_dir need."""
    found = None
    if fleet_file.exists():
        try:
            found = fleet.load(fleet_file)
        except fleet.FleetError as error:
            _fail(str(error))
    else:
        print(
            f"hang-monitor: {fleet_file} is not there: print the unit again when it is, if it has on_wedge or bundle_dir", file=sys.stderr
        )
    command = Path(sys.executable).with_name("hang-monitor")
    try:
        print(packaged.text(str(command), str(fleet_file.absolute()), found), end="")
    except packaged.NotFromAUnit as error:
        _fail(str(error))


@app.command()
def status(url: Annotated[str, typer.Option("--url", help="where `run --status-port` serves")]) -> None:
    """Print what a running monitor sees, as JSON."""
    try:
        _, page = web.ask(url, deadline_s=5)
        print(json.dumps(json.loads(page), indent=2))
    except (OSError, ValueError) as error:
        _fail(f"{url}: {error}", ExitCode.UNREACHABLE)


@app.command()
def version() -> None:
    """Print the version."""
    print(_version())


def _version() -> str:
    try:
        return metadata.version("lastbatch")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _fail(text: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    print(f"hang-monitor: {text}", file=sys.stderr)
    raise typer.Exit(code)


def _line(event: dict[str, Any]) -> str:
    kept = {
        key: value for key, value in event.items() if key not in ("event", "utc", "mono_s", "deployment", "evidence", "missing", "ranks")
    }
    return f"{event['utc']} {event.get('deployment', '')} {event['event']}: " + ", ".join(f"{key}={value}" for key, value in kept.items())


def _told(verdict: Verdict) -> str:
    lines = [f"{verdict.verdict.value}  (confidence {verdict.confidence:.2f})"]
    for item in verdict.evidence:
        where = item.cite.artefact + (f":{item.cite.line}" if item.cite.line else "")
        lines.append(f"  {'for    ' if item.supports else 'against'}  {item.text}  [{where}]")
    lines += [f"  suspect  {suspect}" for suspect in verdict.suspects]
    lines += [f"  missing  {gap.what}: {gap.reason}" for gap in verdict.missing]
    return "\n".join([*lines, f"  runbook  {verdict.runbook}"] if verdict.runbook else lines)


def main() -> None:
    if wrong := finite.problem(sys.argv[1:]):
        print(f"hang-monitor: {wrong}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)
    app()


if __name__ == "__main__":
    main()
