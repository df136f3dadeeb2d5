"""The command line of opsctl. Each command makes an ``Answer``; ``main`` runs it with the streams it is given."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

import typer

from monitors import finite
from monitors.capture.manifest import BundleError
from monitors.exit_codes import ExitCode
from monitors.fleet import FleetError
from opsctl import capture as capturing
from opsctl.answer import Answer, Problem, Session
from opsctl.bundle import app as bundle_app
from opsctl.callers.cli import app as callers_app
from opsctl.demo.cli import demo
from opsctl.drill.cli import app as drill_app
from opsctl.incident import app as incident_app
from opsctl.load.cli import app as load_app
from opsctl.playbooks.cli import app as playbook_app
from opsctl.playbooks.document import PlaybookError
from opsctl.reference import reference
from opsctl.repro.cli import app as repro_app
from opsctl.rollout.cli import app as rollout_app
from opsctl.rollout.desk import Refused
from opsctl.rollout.flags import EditError
from opsctl.runbooks.cli import app as runbook_app
from opsctl.runbooks.cli import approve
from opsctl.service.cli import app as service_app
from opsctl.service.manager import Locked, ServiceError, Unreachable
from opsctl.triage.cli import triage
from opsctl.watch import watch

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of the click that typer carries and does not export whole
_REACH = "try the node's `ssh` of the fleet file by hand; a rollout that is under way there goes back by itself when its lease ends"

app = typer.Typer(
    name="opsctl", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="What a person does to a served model: change it under guard, run it, look at it.",
)  # fmt: skip
app.add_typer(rollout_app, name="rollout")
app.add_typer(service_app, name="service")
app.add_typer(bundle_app, name="bundle")
app.add_typer(callers_app, name="callers")
app.add_typer(incident_app, name="incident")
app.add_typer(playbook_app, name="playbook")
app.add_typer(runbook_app, name="runbook")
app.command()(approve)
app.add_typer(load_app, name="load")
app.add_typer(drill_app, name="drill")
app.add_typer(repro_app, name="repro")
app.command()(demo)
app.command()(watch)
app.command()(triage)
app.command()(reference)


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    shows_version: bool = typer.Option(False, "--version", "-V", help="Print which lastbatch this is.", is_eager=True),
) -> None:
    if shows_version:
        context.obj.stdout.write(f"opsctl {_version()}\n")
        raise typer.Exit


def _version() -> str:
    try:
        return importlib.metadata.version("lastbatch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


@app.command()
def version(context: typer.Context, as_json: bool = typer.Option(False, "--json", help="Print one JSON envelope.")) -> None:
    """Print which lastbatch this is."""
    found = _version()
    context.obj.show(Answer("version", {"version": found}, f"lastbatch {found}"), as_json=as_json)


@app.command()
def capture(
    context: typer.Context,
    fleet_path: str = typer.Option("fleet.toml", "--fleet", help="The fleet file."),
    deployment: str = typer.Option("", "--deployment", help="Which deployment. [default: the only one]"),
    reason: str = typer.Option("on demand", "--reason", help="Kept in the bundle."),
    budget_s: float = typer.Option(60.0, "--budget-s", min=1.0, max=3600.0, help="What all probes may take together, in seconds."),
    native: bool = typer.Option(False, "--native", help="Also take native stacks, which pauses every process."),
    bundle_dir: str = typer.Option("", "--bundle-dir", help="Where to put it. [default: where the fleet file says]"),
    include_prompts: bool = typer.Option(False, "--include-prompts", help="Keep prompts and answers that stand in logs: people's words."),
    redact_ip: bool = typer.Option(False, "--redact-ip", help="Take IP addresses out too."),
    cuda_core_dump: bool = typer.Option(False, "--cuda-core-dump", help="Trigger a device core dump of each rank; it halts the device."),
    fail_on_verdict: bool = typer.Option(False, "--fail-on-verdict", help="Exit 9 when a wedge, a crash or corruption is found."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON envelope."),
) -> None:
    """Take the evidence of this moment from all nodes of a deployment, and judge it."""
    session: Session = context.obj
    answer = capturing.capture(
        fleet_path, deployment, session.env, reason=reason, budget_s=budget_s, native=native, root=Path(bundle_dir) if bundle_dir else None,
        fail_on_verdict=fail_on_verdict, include_prompts=include_prompts, redact_ip=redact_ip, core_dump=cuda_core_dump, say=session.talk,
    )  # fmt: skip
    session.show(answer, as_json=as_json)


def main(
    args: Sequence[str] | None = None, env: Mapping[str, str] | None = None, *,
    stdin: TextIO | None = None, stdout: TextIO | None = None, stderr: TextIO | None = None,
) -> ExitCode:  # fmt: skip
    """Run one command line and return its exit status; streams and environment default to the process's own."""
    args = sys.argv[1:] if args is None else args
    session = Session(
        os.environ if env is None else env, stdin or _lenient(sys.stdin, "replace"), stdout or _lenient(sys.stdout, "backslashreplace"),
        stderr or _lenient(sys.stderr, "backslashreplace"),
    )  # fmt: skip
    words = [word for word in args if not word.startswith("-")]
    words = words[: 2 if words[:1] and words[0] in {group.name for group in app.registered_groups} else 1]
    try:
        if wrong := finite.problem(args):
            raise typer.BadParameter(wrong)
        with contextlib.redirect_stdout(session.stdout), contextlib.redirect_stderr(session.stderr), _term_is_interrupt():
            left_with = app(args=list(args), prog_name="opsctl", standalone_mode=False, obj=session)  # the code of a typer.Exit
        if left_with == ExitCode.INTERRUPTED:  # typer's own word for Ctrl-C: it does not raise what it caught
            raise KeyboardInterrupt
        return ExitCode(left_with) if isinstance(left_with, int) and left_with else session.exit_code
    except _UsageError as error:
        code, problem = ExitCode.USAGE, Problem("usage", error.format_message(), remedy="see --help")  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code, problem = ExitCode.INTERRUPTED, Problem("interrupted", "interrupted; a rollout that was under way is left to its dead-man")
    except Refused as error:
        code, problem = error.code, Problem("refused", str(error), remedy=error.remedy)
    except EditError as error:
        code, problem = ExitCode.USAGE, Problem("usage", str(error))
    except FleetError as error:
        code, problem = ExitCode.USAGE, Problem("fleet", str(error))
    except PlaybookError as error:
        session.show(Answer(" ".join(words), exit_code=ExitCode.USAGE,
                            errors=tuple(Problem("playbook", one.text, f"{one.file}:{one.line}") for one in error.problems)),
                     as_json="--json" in args)  # fmt: skip
        return session.exit_code
    except BundleError as error:
        code, problem = ExitCode.USAGE, Problem("bundle", str(error))
    except Locked as error:
        code, problem = ExitCode.LOCKED, Problem("locked", str(error))
    except Unreachable as error:
        code, problem = ExitCode.UNREACHABLE, Problem("unreachable", str(error), remedy=_REACH)
    except ServiceError as error:
        code, problem = ExitCode.USAGE, Problem("service", str(error))
    except OSError as error:
        code, problem = ExitCode.INTERNAL, Problem("system", f"{error.strerror or error}", where=str(error.filename or ""))
    except Exception as error:  # a defect: told in the same form as everything else, its traceback beside it
        session.talk(traceback.format_exc().rstrip())
        code = ExitCode.INTERNAL
        problem = Problem("internal", f"{type(error).__name__}: {error}", remedy="a defect of opsctl; the traceback is on standard error")
    session.show(Answer(" ".join(words), exit_code=code, errors=(problem,)), as_json="--json" in args)
    return session.exit_code


def _lenient(stream: TextIO | None, errors: str) -> TextIO:
    """A name that is no UTF-8, a terminal that knows fewer characters: shown or read as far as it goes. One that was closed
    before we began is a null device, lest a file of ours gets its number."""
    if stream is None:
        return Path(os.devnull).open("r+")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=errors)
    return stream


@contextlib.contextmanager
def _term_is_interrupt() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, mean what Ctrl-C means: revert, then leave. Only the main thread may say so."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else [])]  # nohup stays nohup
    try:
        before = {number: signal.signal(number, interrupt) for number in heard}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
