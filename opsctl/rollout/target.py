"""What a rollout acts on: the services of one deployment, in groups that live and die together, and their APIs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from monitors import engines, fleet, keyfile
from monitors.remote import Remote
from opsctl.rollout.plan import Drain
from opsctl.service import definition
from opsctl.service.container import ContainerService
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import ServiceError, ServiceManager
from opsctl.service.systemd import SystemdService


@dataclass(frozen=True)
class Member:
    """One service of a group, with the global ranks that it runs and the folder of their black boxes. ``drain``: how its
    node leaves a router and comes back, on the first service of a node that says so."""

    manager: ServiceManager
    ranks: tuple[int, ...]
    run_dir: str
    replica: str = ""
    api: str = ""
    drain: Drain | None = None

    @property
    def name(self) -> str:
        return self.manager.name


@dataclass(frozen=True)
class Target:
    """A tensor-parallel group is one unit of failure: its members stop, change, start and revert together. A deployment
    of several replicas is several groups (``groups``), and as a whole is what is armed, committed and locked together."""

    name: str
    engine: str
    api: str
    api_key: str
    members: tuple[Member, ...]

    @property
    def managers(self) -> tuple[ServiceManager, ...]:
        return tuple(member.manager for member in self.members)

    @property
    def groups(self) -> tuple[Target, ...]:
        """Each replica as a target of its own, in the order of the fleet file: the first is the canary."""
        replicas: dict[str, list[Member]] = {}
        for member in self.members:
            replicas.setdefault(member.replica, []).append(member)
        return tuple(
            dataclasses.replace(self, api=members[0].api or self.api, members=tuple(members)) for members in replicas.values()
        )  # fmt: skip

    @property
    def drains(self) -> tuple[Drain, ...]:
        return tuple(member.drain for member in self.members if member.drain)

    @property
    def port(self) -> int:
        """Where its API listens; 0 when the address names none."""
        return urlsplit(self.api).port or 0

    @property
    def serves(self) -> ServiceManager:
        """The member that the API is expected on: that of the lowest rank, else the first."""
        return min(self.members, key=lambda member: min(member.ranks, default=0)).manager

    @property
    def speaks_digest(self) -> bool:
        """Whether the engine tells its configuration digest, logs each request and keeps black boxes."""
        return engines.load(self.engine).black_box


def services_folder(deployment: fleet.Deployment, fleet_path: str, env: Mapping[str, str]) -> Path:
    """``$OPSCTL_SERVICES``, else ``services`` beside the fleet file, else the user's own folder."""
    beside = Path(fleet_path).absolute().parent / "services"
    return beside if not env.get("OPSCTL_SERVICES") and beside.is_dir() else definition.services_folder(env)


def of(deployment: fleet.Deployment, fleet_path: str, env: Mapping[str, str]) -> Target:
    """Touches nothing. Raises ServiceError for a deployment without services, or whose definitions cannot be used."""
    members: list[Member] = []
    drained: set[str] = set()
    for node in deployment.node:
        remote = Remote(node) if deployment.service != "embedded" else None
        for service in node.service:
            if service.role == "router":
                continue
            manager = _embedded(deployment, service, fleet_path, env) if remote is None else _systemd(deployment, service, remote)
            drain = Drain(manager.name, node.drain, node.undrain, node.drain_s) if node.drain and node.name not in drained else None
            drained.add(node.name)
            members.append(Member(manager, service.ranks, service.run_dir, node.replica, node.api, drain))
    if not members:
        raise ServiceError(
            f"{fleet_path}: deployment.{deployment.name}: no service to change; add [[deployment.{deployment.name}.node.service]]"
        )
    key = keyfile.read(deployment.api_key_file) if deployment.api_key_file else ""
    return Target(deployment.name, deployment.engine, deployment.api, key, tuple(members))


def _systemd(deployment: fleet.Deployment, service: fleet.Service, remote: Remote) -> ServiceManager:
    user = deployment.service == "systemd-user"
    if service.container:
        return ContainerService(remote, service.unit, service.container, user=user)
    return SystemdService(remote, service.unit, user=user)


def _embedded(deployment: fleet.Deployment, service: fleet.Service, fleet_path: str, env: Mapping[str, str]) -> ServiceManager:
    if not service.command:
        return EmbeddedService(services_folder(deployment, fleet_path, env), service.unit, env)
    argv = [*service.command, *service.args]
    found = definition.Definition(argv=argv, env=service.env, cwd=service.cwd or "/", run_dir=service.run_dir, log=service.log)
    return EmbeddedService(fleet.state_root(env) / "services", service.unit, env, found)
