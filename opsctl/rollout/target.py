"""What a rollout acts on: the services of one deployment as one group, and its API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from monitors import engines, fleet
from monitors.remote import Remote
from opsctl.service import definition
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import ServiceError, ServiceManager
from opsctl.service.systemd import SystemdService


@dataclass(frozen=True)
class Member:
    """One service of the group, with the global ranks that it runs and the folder of their black boxes."""

    manager: ServiceManager
    ranks: tuple[int, ...]
    run_dir: str

    @property
    def name(self) -> str:
        return self.manager.name


@dataclass(frozen=True)
class Target:
    """A tensor-parallel group is one unit of failure: its members stop, change, start and revert together."""

    name: str
    engine: str
    api: str
    api_key: str
    members: tuple[Member, ...]

    @property
    def managers(self) -> tuple[ServiceManager, ...]:
        return tuple(member.manager for member in self.members)

    @property
    def speaks_digest(self) -> bool:
        """Whether the engine tells its configuration digest, logs each request and keeps black boxes."""
        return engines.load(self.engine).black_box


def services_folder(deployment: fleet.Deployment, fleet_path: str, env: Mapping[str, str]) -> Path:
    """``$OPSCTL_SERVICES``, else ``services`` beside the fleet file, else the user's own folder."""
    beside = Path(fleet_path).absolute().parent / "services"
    return beside if not env.get("OPSCTL_SERVICES") and beside.is_dir() else definition.services_folder(env)


def of(deployment: fleet.Deployment, fleet_path: str, env: Mapping[str, str]) -> Target:
    """Raises ServiceError for a deployment without services, or whose definitions cannot be used."""
    members = []
    folder = services_folder(deployment, fleet_path, env)
    for node in deployment.node:
        for service in node.service:
            if service.role == "router":
                continue
            if deployment.service == "systemd":
                manager: ServiceManager = SystemdService(Remote(node), service.unit)
            elif service.command:
                manager = EmbeddedService(_materialise(service, env), service.unit, env)
            else:
                manager = EmbeddedService(folder, service.unit, env)
            members.append(Member(manager, service.ranks, service.run_dir))
    if not members:
        raise ServiceError(
            f"{fleet_path}: deployment.{deployment.name}: no service to change; add [[deployment.{deployment.name}.node.service]]"
        )
    key = Path(deployment.api_key_file).read_text().strip() if deployment.api_key_file else ""
    return Target(deployment.name, deployment.engine, deployment.api, key, tuple(members))


def _materialise(service: fleet.Service, env: Mapping[str, str]) -> Path:
    """A service that the fleet file describes whole, as the definition file that its supervisor reads."""
    folder = fleet.state_root(env) / "services"
    argv = [*service.command, *service.args]
    found = definition.Definition(argv=argv, env=service.env, cwd=service.cwd or "/", run_dir=service.run_dir, log=service.log)
    definition.write(folder / f"{service.unit}.toml", found)
    return folder
