"""What a rollout would do, in full, before anything is touched."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence

import msgspec

from opsctl.callers.agreed import Agreed
from opsctl.callers.foresee import Foreseen
from opsctl.rollout import flags
from opsctl.service.manager import Override, ServiceError, ServiceManager

_PREDICT_S = 60.0


class Command(msgspec.Struct, frozen=True):
    argv: tuple[str, ...]
    env: dict[str, str]


class ServicePlan(msgspec.Struct, frozen=True):
    """One service before and after. ``added`` are the variables that the trial override must carry."""

    name: str
    node: str
    before: Command
    after: Command
    added: dict[str, str]

    def override(self) -> Override:
        return Override(self.after.argv, self.added)


class Times(msgspec.Struct, frozen=True):
    """Deadlines in seconds. ``stop_s`` holds for all services of the group together."""

    boot_s: float = 720.0
    stable_s: float = 60.0
    stop_s: float = 90.0
    answer_s: float = 120.0
    lease_s: float = 60.0
    hold_s: float = 3600.0

    def problems(self) -> tuple[str, ...]:
        """Why these cannot work together; empty when they can."""
        found = []
        if self.answer_s > self.boot_s:
            found.append(f"--boot-deadline-s {self.boot_s:g} is below the {self.answer_s:g} s that one answer may take")
        if self.hold_s < self.lease_s:
            found.append(f"hold_s {self.hold_s:g} is below the lease of {self.lease_s:g} s")
        return tuple(found)


class Plan(msgspec.Struct, frozen=True):
    """``digest_*``: the configuration digests that the engine itself predicts; empty where it cannot. ``agreed``: changes
    of callers' answers that are declared; ``foreseen``: what flags tell of them; ``allowance_pct``: of throughput."""

    deployment: str
    edits: tuple[str, ...]
    services: tuple[ServicePlan, ...]
    digest_before: str
    digest_after: str
    times: Times
    reason: str = ""
    incident: bool = False
    agreed: dict[str, Agreed] = {}
    foreseen: tuple[Foreseen, ...] = ()
    allowance_pct: float | None = None

    @property
    def digest(self) -> str:
        """Of the plan itself: what was shown is what is applied, or it is refused."""
        text = json.dumps([[s.name, s.before.argv, s.before.env, s.after.argv, s.after.env] for s in self.services], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def diff(self) -> str:
        """Unified, one argument or variable a line, each service under its own heading."""
        parts: list[str] = []
        for service in self.services:
            where = f"{service.name} on {service.node}"
            parts += difflib.unified_diff(
                _lines(service.before), _lines(service.after), f"{where} (now)", f"{where} (planned)", n=2, lineterm=""
            )
        return "\n".join(parts)


def _lines(command: Command) -> list[str]:
    """A flag and its value on one line, as a person reads it."""
    lines: list[str] = []
    for argument in command.argv:
        if lines and lines[-1].startswith("--") and " " not in lines[-1] and "=" not in lines[-1] and not argument.startswith("--"):
            lines[-1] += f" {argument}"
        else:
            lines.append(argument)
    return lines + [f"{key}={value}" for key, value in sorted(command.env.items())]


def make(
    deployment: str, managers: Sequence[ServiceManager], edits: Sequence[flags.Edit], env: Mapping[str, str], times: Times, *,
    predicts: bool, reason: str = "", incident: bool = False,
) -> Plan:  # fmt: skip
    """Read what every service would run now, and edit it. Touches nothing.

    ``predicts``: the engine can tell its digest from arguments (see ``predict``).

    Raises:
        EditError: an edit that cannot be made or changes nothing, or arguments that the engine itself refuses.
        ServiceError: a service that cannot be read.
    """
    services = []
    for manager in managers:
        now, committed = manager.command(), manager.read_change().committed
        before = Command(now.argv, dict(now.env))
        added = {**(committed.env if committed else {}), **env}
        after = Command(flags.edit(now.argv, edits), {**before.env, **env})
        services.append(ServicePlan(manager.name, manager.node, before, after, added))
    if all(service.before == service.after for service in services):
        raise flags.EditError(
            f"{deployment}: {', '.join(map(str, edits)) or 'nothing given'}: every service runs so already; nothing to roll out"
        )
    before_digest = after_digest = ""
    if predicts:
        pairs = list(zip(managers, services, strict=True))
        before_digest = _one_digest(deployment, [predict(manager, service.before.argv, {}) for manager, service in pairs])
        after_digest = _one_digest(deployment, [predict(manager, service.after.argv, service.added) for manager, service in pairs])
    texts = (*map(str, edits), *(f"--env {key}={value}" for key, value in env.items()))
    return Plan(deployment, texts, tuple(services), before_digest, after_digest, times, reason, incident)


def _one_digest(deployment: str, digests: Sequence[str]) -> str:
    if len(set(digests)) != 1:
        raise flags.EditError(f"{deployment}: its services would run different configurations ({', '.join(digests)}); one group needs one")
    return digests[0]


def predict(manager: ServiceManager, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Ask the deployment's own build, where it is installed, which digest these arguments give.

    Raises:
        EditError: the build refuses the arguments; the text is its own.
        ServiceError: the command line is not ``PROGRAM... serve ARGS...``, or the build does not answer.
    """
    if "serve" not in argv:
        raise ServiceError(
            f"{manager.name}: its command line has no `serve`, so its flags cannot be told from the rest: {' '.join(argv[:4])}"
        )
    at = list(argv).index("serve")
    asked = (*argv[:at], "config", "--json", "--", *argv[at + 1 :])
    code, out, err = manager.run(("env", *(f"{key}={value}" for key, value in env.items()), *asked), _PREDICT_S)
    if code:
        said = err.strip() or out.strip() or f"exit status {code}"
        raise flags.EditError(f"{manager.name} on {manager.node}: refused by the build that is installed there: {said.splitlines()[-1]}")
    try:
        answer = json.loads(out)
        return str(answer["digest"] if "digest" in answer else answer["data"]["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{manager.name}: `{' '.join(asked[: at + 2])}` gave no digest: {error}") from error
