"""The monitor's systemd unit for one fleet file: the packaged one, and of its hardening exactly that taken back which this
fleet file's bundles and ``on_wedge`` need.

An action of ``on_wedge`` is an ``opsctl`` command that the monitor starts, so it runs inside the unit. What is done on another
node is done there, over ssh, and needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources

from monitors.fleet import Deployment, Fleet, Service

STATE = "/var/lib/hang-monitor"
_MARKS = ("/run/opsctl",)  # that a stop was ordered is written there, which is why it pages nobody
_ROLLS_OUT = (*_MARKS, "/run/systemd/system", "/run/systemd/system.control", "/etc/systemd/system", "/var/lib/opsctl")
_SHARED_TMP = ("/tmp/", "/var/tmp/")


class NotFromAUnit(ValueError):
    """The fleet file asks for what no system unit can do. ``problems`` has a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def text(command: str, fleet_path: str, found: Fleet | None) -> str:
    """The unit. ``command`` is hang-monitor's path; without ``found`` (no such file yet) it is that of a fleet file that asks
    for no action and keeps bundles where they are by default. Raises NotFromAUnit."""
    plain = (resources.files("monitors.packaging") / "hang-monitor.service").read_text(encoding="utf-8")
    plain = plain.replace("@HANG_MONITOR@", command).replace("@FLEET@", fleet_path)
    lines = _taken_back(found) if found else []
    if not lines:
        return plain
    head = f"# What {fleet_path} asks for beyond that; print this file again when on_wedge, bundle_dir or a log changes there."
    return plain.replace("\n[Install]", "\n".join(["", head, *lines, "", "[Install]"]))


def _taken_back(found: Fleet) -> list[str]:
    deployments = list(found.deployment.values())
    if problems := [problem for one in deployments for problem in _impossible(one)]:
        raise NotFromAUnit(f"{found.path}: {problem}" for problem in problems)
    lines: list[str] = []
    bundles = [one.bundle_dir for one in deployments if one.bundle_dir and not f"{one.bundle_dir}/".startswith(f"{STATE}/")]
    if bundles:
        lines += ["# bundle_dir:", *_writes(bundles)]
    acting = [one for one in deployments if one.on_wedge.action != "page"]
    rolls = [one.name for one in acting if one.on_wedge.action == "playbook" and any(_here(one))]
    restarts = [one.name for one in acting if one.on_wedge.action == "restart" and any(_here(one))]
    if rolls:
        lines += [f"# on_wedge of {', '.join(rolls)}: a playbook may roll out, which writes drop-ins and the dead-man's files."]
    if restarts:
        lines += [f"# on_wedge of {', '.join(restarts)}: a restart notes that it was ordered."]
    if rolls or restarts:
        lines += _writes(_ROLLS_OUT if rolls else _MARKS)
    if acting:
        lines += ["# opsctl and what it starts run beside the watch.", "MemoryHigh=512M", "MemoryMax=1G", "CPUQuota=100%"]
    if any(_in_tmp(service) for one in deployments for service in _here(one)):
        lines += ["# Black boxes or logs lie in /tmp.", "PrivateTmp=no"]
    return lines


def _writes(folders: Iterable[str]) -> list[str]:
    """They are made outside of the sandbox. The dash is for that command, whose own mounts are laid out before them."""
    words = list(dict.fromkeys(folders))
    return [f"ExecStartPre=+/bin/mkdir -p {' '.join(words)}", f"ReadWritePaths={' '.join(f'-{word}' for word in words)}"]


def _impossible(one: Deployment) -> Iterator[str]:
    if one.on_wedge.action == "page" or one.service == "systemd" or not any(_here(one)):
        return
    why = (
        "the supervisor and the server would be started inside the monitor's unit, under its limits, and end with it"
        if one.service == "embedded"
        else "a system unit does not reach a user's service manager"
    )
    yield (
        f'deployment.{one.name}.on_wedge.action: "{one.on_wedge.action}" cannot be done from a system unit where service = '
        f'"{one.service}" on this machine: {why}; use "page", or start `hang-monitor run` as the user whose services these are'
    )


def _here(one: Deployment) -> list[Service]:
    return [service for node in one.node if not node.ssh for service in node.service]


def _in_tmp(service: Service) -> bool:
    return f"{service.run_dir}/".startswith(_SHARED_TMP) or service.log.startswith(_SHARED_TMP)
