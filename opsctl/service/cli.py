"""``opsctl service``: run services under the embedded supervisor, for a machine without a service manager."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from monitors import fleet
from opsctl.answer import Answer, Session
from opsctl.service import together, wait
from opsctl.service.definition import services_folder
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import ServiceError, ServiceManager, Snapshot, State
from opsctl.service.supervisor import Supervisor
from opsctl.service.voice import Voice
from opsctl.service.wait import Waiter

app = typer.Typer(no_args_is_help=True, help="Run services under the embedded supervisor.")

NAME = typer.Argument(help="The service: NAME.toml in the services folder.")
ANY = typer.Argument("", help="The service: NAME.toml in the services folder, or with --fleet a unit, or UNIT@NODE. [default: all]")
OF_FLEET = typer.Option("", "--fleet", help="Look at a deployment of this fleet file, systemd units over ssh among them.")
SERVICES = typer.Option("", "--services", help="Folder of service definitions. [default: $OPSCTL_SERVICES, else the user's configuration]")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")
INVOCATION = typer.Option("", "--invocation", help="Of which start. [default: the last]")
FLEET = typer.Option("fleet.toml", "--fleet", help="The fleet file.")
DEPLOYMENT = typer.Option("", "--deployment", help="Which deployment. [default: the only one]")
DEADLINE = typer.Option(720.0, "--deadline-s", min=0.1, max=86_400.0, help="How long to wait for it, in seconds.")


def _service(session: Session, services: str, name: str) -> EmbeddedService:
    return EmbeddedService(Path(services) if services else services_folder(session.env), name, session.env)


def _show(session: Session, command: str, service: EmbeddedService, as_json: bool) -> None:
    found = service.snapshot()
    data = {"name": service.name, **msgspec.to_builtins(found), "argv": list(service.argv()), "run_dir": service.run_dir()}
    session.show(Answer(command, data, _line(service.name, found)), as_json=as_json)


def _line(name: str, found: Snapshot) -> str:
    start = f"main process {found.main_pid or '-'}, invocation {found.invocation_id or '-'}"
    said = f" ({found.status})" if found.status else ""
    return f"{name}: {found.state}, {start}, restarts {found.restarts}, {found.result}{said}"


@app.command()
def start(context: typer.Context, name: str = NAME, services: str = SERVICES, deadline_s: float = DEADLINE, as_json: bool = JSON) -> None:
    """Start a service and wait until it is ready."""
    session: Session = context.obj
    service, waiter = _service(session, services, name), Waiter(talk=session.talk)
    if not service.snapshot().running:
        wait.start([service], waiter, deadline_s)
    _until_ready([service], name, waiter, deadline_s)
    _show(session, "service start", service, as_json)


@app.command()
def stop(context: typer.Context, name: str = NAME, services: str = SERVICES, deadline_s: float = DEADLINE, as_json: bool = JSON) -> None:
    """Stop a service with everything it started, and its supervisor."""
    session: Session = context.obj
    service = _service(session, services, name)
    service.end()
    Waiter(talk=session.talk).until(f"{name} to end", lambda: service.ended, deadline_s)
    _show(session, "service stop", service, as_json)


@app.command()
def restart(context: typer.Context, name: str = NAME, services: str = SERVICES, deadline_s: float = DEADLINE, as_json: bool = JSON) -> None:
    """Stop a service, start it again and wait until it is ready."""
    session: Session = context.obj
    service, waiter = _service(session, services, name), Waiter(talk=session.talk)
    wait.stop([service], waiter, deadline_s)
    wait.start([service], waiter, deadline_s)
    _until_ready([service], name, waiter, deadline_s)
    _show(session, "service restart", service, as_json)


@app.command("start-group")
def start_group(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, deadline_s: float = DEADLINE, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Start all services of a deployment together and wait until all are ready."""
    _on_group(context.obj, "start-group", fleet_path, deployment, deadline_s, as_json, stops=False, starts=True)


@app.command("stop-group")
def stop_group(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, deadline_s: float = DEADLINE, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Stop all services of a deployment together."""
    _on_group(context.obj, "stop-group", fleet_path, deployment, deadline_s, as_json, stops=True, starts=False)


@app.command("restart-group")
def restart_group(
    context: typer.Context, fleet_path: str = FLEET, deployment: str = DEPLOYMENT, deadline_s: float = DEADLINE, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Stop all services of a deployment together, start them together and wait until all are ready."""
    _on_group(context.obj, "restart-group", fleet_path, deployment, deadline_s, as_json, stops=True, starts=True)


def _on_group(session: Session, command: str, fleet_path: str, deployment: str, deadline_s: float, as_json: bool, *,
              stops: bool, starts: bool) -> None:  # fmt: skip
    from opsctl.rollout import target  # it stands on this package

    one = fleet.load(fleet_path).one(deployment)
    group = target.of(one, fleet_path, session.env).managers
    with Voice(session.talk).kept_up() as voice:
        waiter = Waiter(talk=voice)
        if stops:
            wait.stop(group, waiter, deadline_s)
        if starts:
            wait.start([manager for manager in group if not manager.snapshot().running], waiter, deadline_s)
            _until_ready(group, one.name, waiter, deadline_s)
        else:  # what was started for this deployment alone goes too; the next start brings it back
            for manager in group:
                if isinstance(manager, EmbeddedService):
                    manager.end()
    data = {"services": {manager.name: msgspec.to_builtins(manager.snapshot()) for manager in group}}
    text = f"{one.name}: {', '.join(f'{manager.name} {manager.snapshot().state}' for manager in group)}"
    session.show(Answer(f"service {command}", data, text), as_json=as_json)


@app.command()
def gate(
    context: typer.Context, units: list[str] = typer.Argument(help="The units that a key may change."),  # noqa: B008
    python: str = typer.Option("python3", "--python", help="The node's Python, as the fleet file names it."),
) -> None:  # fmt: skip
    """Print the forced command that limits an ssh key on a node to rollouts of these units (docs/least-privilege.md)."""
    from opsctl.rollout import gatetext  # it stands on this package

    session: Session = context.obj
    session.show(Answer("service gate", None, gatetext.text(units, python)), as_json=False)


@app.command()
def status(
    context: typer.Context, name: str = ANY, services: str = SERVICES, fleet_path: str = OF_FLEET, deployment: str = DEPLOYMENT,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Say how a service is; with --fleet those of a deployment, whoever runs them and wherever."""
    session: Session = context.obj
    if not fleet_path:
        _show(session, "service status", _service(session, services, _needed(name)), as_json)
        return
    found = together.each(_of_fleet(session, name, fleet_path, deployment), lambda manager: (manager.node, manager.snapshot()))
    data = [{"name": one, "node": node, **msgspec.to_builtins(snapshot)} for one, (node, snapshot) in found.items()]
    lines = [_line(one, snapshot) for one, (_, snapshot) in found.items()]
    session.show(Answer("service status", {"services": data}, "\n".join(lines)), as_json=as_json)


@app.command()
def log(
    context: typer.Context, name: str = ANY, services: str = SERVICES, invocation: str = INVOCATION, fleet_path: str = OF_FLEET,
    deployment: str = DEPLOYMENT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Print the lines of one start, those of its service manager about it among them; with --fleet of a deployment's service."""
    session: Session = context.obj
    managers: Sequence[ServiceManager] = (
        _of_fleet(session, name, fleet_path, deployment) if fleet_path else (_service(session, services, _needed(name)),)
    )
    if len(managers) > 1:
        raise typer.BadParameter(f"NAME: say whose log: {', '.join(manager.name for manager in managers)}")
    lines = managers[0].log(invocation or managers[0].snapshot().invocation_id)
    session.show(Answer("service log", msgspec.to_builtins(lines), "\n".join(line.text for line in lines)), as_json=as_json)


def _needed(name: str) -> str:
    if not name:
        raise typer.BadParameter("NAME: name a service of the services folder, or give --fleet")
    return name


def _of_fleet(session: Session, name: str, fleet_path: str, deployment: str) -> tuple[ServiceManager, ...]:
    """The services of a deployment; with a name those that bear it, as a unit or as a unit on a node."""
    from opsctl.rollout import target  # it stands on this package

    one = fleet.load(fleet_path).one(deployment)
    managers = target.of(one, fleet_path, session.env).managers
    found = tuple(manager for manager in managers if name in ("", manager.name, manager.name.rpartition("@")[0]))
    if not found:
        known = ", ".join(manager.name for manager in managers)
        raise typer.BadParameter(f"NAME: {one.name} has no service {name}, but {known}")
    return found


@app.command()
def run(context: typer.Context, name: str = NAME, services: str = SERVICES) -> None:
    """Supervise a service in the foreground until SIGTERM or Ctrl-C."""
    session: Session = context.obj
    folder = (Path(services) if services else services_folder(session.env)).absolute()
    supervisor = Supervisor(folder, name, session.env)
    session.talk(f"supervising {name}; Ctrl-C stops it")
    sys.exit(supervisor.run(start=True))


def _until_ready(services: Sequence[ServiceManager], what: str, waiter: Waiter, deadline_s: float) -> None:
    """Ready in two looks at the same start: one that dies of what it was ready for is not. Raises ServiceError as soon as a
    service has failed for good, or three times in a row."""
    seen: dict[str, str] = {}

    def ready(name: str, found: Snapshot, service: ServiceManager) -> bool:
        if found.state is State.failed or (found.waiting_to_restart and found.restarts >= 2):
            tail = "\n".join(line.text for line in service.log(found.invocation_id)[-20:])
            raise ServiceError(f"{name}: {found.state} ({found.result}), restarts {found.restarts}; its last lines:\n{tail}")
        before, seen[name] = seen.get(name, ""), found.invocation_id if found.state is State.active else ""
        return bool(seen[name]) and seen[name] == before

    def all_ready() -> bool:
        found = together.snapshots(services)
        looks = [ready(service.name, found[service.name], service) for service in services]  # each, for each may have failed
        return all(looks)

    waiter.until(f"{what} to be ready", all_ready, deadline_s)
