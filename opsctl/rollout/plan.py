"""What a rollout would do, in full, before anything is touched."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import msgspec

from opsctl.callers.agreed import Agreed
from opsctl.callers.foresee import Foreseen
from opsctl.rollout import buildhelp, flags, unitfile, upgrade
from opsctl.rollout.deadlines import Times
from opsctl.rollout.overlay import Overlay
from opsctl.rollout.wish import Wish
from opsctl.service import together
from opsctl.service.manager import Override, ServiceError, ServiceManager, UnitFile

__all__ = ["Command", "Drain", "FileChange", "Plan", "RevertTarget", "ServicePlan", "Times", "make", "predict"]
_PREDICT_S = 60.0


class Command(msgspec.Struct, frozen=True):
    """``mounts``: path as the service sees it -> the file that is there instead. ``unit``: the unit file that a rollout
    put there, as ``UnitFile.name``; empty where none did."""

    argv: tuple[str, ...]
    env: dict[str, str]
    mounts: dict[str, str] = {}
    unit: str = ""


class FileChange(msgspec.Struct, frozen=True):
    """A file that a commit writes, with its text now and then; ``trial``: where it lies until then. ``is_unit``: the unit's
    own file, not one of opsctl's."""

    path: str
    before: str
    after: str
    trial: str
    is_unit: bool = False

    def diff(self, node: str) -> list[str]:
        at = f"{node}:{self.path}"
        lines = self.before.splitlines(), self.after.splitlines()
        return list(difflib.unified_diff(*lines, f"{at} (now)", f"{at} (at the commit)", n=1, lineterm=""))


class ServicePlan(msgspec.Struct, frozen=True):
    """One service before and after. ``added`` are the variables that the trial override must carry; ``committed`` the
    override that holds now, which a revert leaves or puts back. ``unit``: the unit file that belongs to it then, with
    its text where it is new; ``unit_before``: now."""

    name: str
    node: str
    before: Command
    after: Command
    added: dict[str, str]
    committed: Command | None = None
    files: tuple[FileChange, ...] = ()
    unit: UnitFile | None = None
    unit_text: str = ""
    unit_before: UnitFile | None = None
    notes: tuple[str, ...] = ()

    @property
    def more_than_arguments(self) -> bool:
        """Whether the change is in something that a process does not show on its command line."""
        return bool(self.unit_text) or msgspec.structs.replace(self.before, argv=()) != msgspec.structs.replace(self.after, argv=())

    def override(self) -> Override:
        return Override(self.after.argv, self.added, self.after.mounts, self.unit)

    def override_before(self) -> Override | None:
        return Override(self.committed.argv, self.committed.env, self.committed.mounts, self.unit_before) if self.committed else None


class Drain(msgspec.Struct, frozen=True):
    """How a service's group leaves its router before it is stopped (``out``) and comes back (``back``)."""

    service: str
    out: tuple[str, ...]
    back: tuple[str, ...]
    deadline_s: float


class RevertTarget(msgspec.Struct, frozen=True):
    """The last verified configuration. ``runs_now``: every service is configured as it was then."""

    digest: str
    at_utc: str
    by: str
    runs_now: bool


class Plan(msgspec.Struct, frozen=True):
    """``digest_*``: the configuration digests that the engine itself predicts; empty where it cannot. ``groups``: the
    services of each replica, in the order in which they are changed. ``notes``: what could not be checked. ``agreed`` and
    ``foreseen``: of callers, see ``survey.py``; ``allowance_pct``: the loss of speed that is allowed, None: not measured;
    ``failure_budget``: how often a replica after the first may fail and is started once more."""

    deployment: str
    edits: tuple[str, ...]
    services: tuple[ServicePlan, ...]
    digest_before: str
    digest_after: str
    times: Times
    reason: str = ""
    incident: bool = False
    times_from: dict[str, str] = {}
    groups: tuple[tuple[str, ...], ...] = ()
    revert: RevertTarget | None = None
    overlays: tuple[Overlay, ...] = ()
    notes: tuple[str, ...] = ()
    agreed: dict[str, Agreed] = {}
    foreseen: tuple[Foreseen, ...] = ()
    allowance_pct: float | None = None
    failure_budget: int = 0
    drains: tuple[Drain, ...] = ()

    @property
    def digest(self) -> str:
        """Of the plan itself: what was shown is what is applied, or it is refused."""
        services = [[s.name, s.before.argv, s.before.env, s.before.mounts, s.after.argv, s.after.env, s.after.mounts,
                     [[one.path, one.before, one.after] for one in s.files]] for s in self.services]  # fmt: skip
        return hashlib.sha256(json.dumps(services, sort_keys=True).encode()).hexdigest()[:16]

    def diff(self) -> str:
        """Unified, one argument or variable a line, each service and each file under its own heading."""
        return "\n".join(part for part in (self.commands_diff(), self.files_diff()) if part)

    def commands_diff(self) -> str:
        """What each service runs and is made of, now and then."""
        parts: list[str] = []
        for service in self.services:
            where = f"{service.name} on {service.node}"
            parts += difflib.unified_diff(
                _lines(service.before), _lines(service.after), f"{where} (now)", f"{where} (planned)", n=2, lineterm=""
            )
            parts += [line for file in service.files if file.is_unit for line in file.diff(service.node)]
        return "\n".join(parts)

    def files_diff(self) -> str:
        """The files of opsctl's own that make it last, now and as the commit writes them."""
        found = [file.diff(service.node) for service in self.services for file in service.files if not file.is_unit]
        return "\n".join(line for lines in found for line in lines)


def _lines(command: Command) -> list[str]:
    """A flag and its value on one line, as a person reads it."""
    lines: list[str] = []
    for argument in command.argv:
        if lines and lines[-1].startswith("--") and " " not in lines[-1] and "=" not in lines[-1] and not argument.startswith("--"):
            lines[-1] += f" {argument}"
        else:
            lines.append(argument)
    lines += [f"{key}={value}" for key, value in sorted(command.env.items())]
    return lines + [f"{target} is {source}" for target, source in sorted(command.mounts.items())]


def make(
    deployment: str, managers: Sequence[ServiceManager], wish: Wish, times: Times, *, predicts: bool,
    times_from: Mapping[str, str] | None = None, groups: tuple[tuple[str, ...], ...] = (), revert: RevertTarget | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """Read what every service would run now, and edit it. Touches nothing.

    ``predicts``: the engine can tell its digest from arguments (see ``predict``).

    Raises:
        EditError: an edit that cannot be made or changes nothing, or arguments that the engine itself refuses.
        ServiceError: a service that cannot be read.
    """
    services = [_service(manager, wish) for manager in managers]
    if all(service.before == service.after and not service.unit_text for service in services):
        raise flags.EditError(
            f"{deployment}: {', '.join(wish.words())}: every service runs so already; nothing to roll out"
            if wish.words()
            else f"{deployment}: no change is given; say what with --set FLAG=VALUE, --unset FLAG, --env NAME=VALUE, --playbook NAME "
            "or another option of `opsctl rollout plan --help`"
        )
    before_digest = after_digest = ""
    if predicts:
        planned = {service.name: service for service in services}

        def digests(which: Callable[[ServicePlan], tuple[Sequence[str], Mapping[str, str]]], *, fits: bool) -> list[str]:
            return list(together.each(managers, lambda manager: predict(manager, *which(planned[manager.name]), fits=fits)).values())

        before_digest = _one_digest(deployment, digests(lambda service: (service.before.argv, {}), fits=False))
        try:
            after_digest = _one_digest(deployment, digests(lambda service: (service.after.argv, service.added), fits=True))
        except flags.EditError:
            with contextlib.suppress(ServiceError):  # a build without a help text: its own words have to do
                buildhelp.refuse_unknown(managers[0], services[0].after.argv, wish.edits)
            raise
    return Plan(deployment, wish.words(), tuple(services), before_digest, after_digest, times, wish.reason, wish.incident,
                dict(times_from or {}), groups, revert, wish.overlays, (*notes, *(n for s in services for n in s.notes)),
                failure_budget=wish.failure_budget)  # fmt: skip


def _service(manager: ServiceManager, wish: Wish) -> ServicePlan:
    now, committed = manager.command(), manager.read_change().committed
    before = Command(now.argv, dict(now.env), dict(now.mounts), now.unit)
    wanted = unitfile.wished(wish.unit_files, manager)
    new = unitfile.replace(wanted, manager, now) if wanted else None
    argv, env = (new.argv, new.env) if new else (now.argv, before.env)
    image = manager.image()
    if wish.image:
        argv = upgrade.image(argv, image, wish.image)
    if wish.package:
        argv = upgrade.package(argv, wish.package)
    if wish.model:
        argv = upgrade.model(argv, wish.model)
    first = argv.index(wish.image or image) + 1 if image else 0
    mounts = {**before.mounts, **{one.target: manager.kept_path(one.name) for one in wish.overlays}}
    for target in wish.uncover:
        if mounts.pop(target, None) is None:
            raise flags.EditError(
                f"--remove-overlay {target}: {manager.name} has no overlay there, but {', '.join(mounts) or 'none at all'}"
            )
    now_unit = committed.unit if committed else None
    unit = new.unit if new else now_unit
    after = Command(flags.edit(argv, wish.edits, first), {**env, **wish.env}, mounts, unit.name if unit else "")
    added = {**(committed.env if committed else {}), **wish.env}
    path, text = manager.committed_file(Override(after.argv, added, mounts, unit))
    files = [FileChange(path, manager.committed_file(committed)[1], text, manager.trial_path())]
    if new:
        files.insert(0, FileChange(new.path, new.before, new.after, new.trial, True))
    kept = Command(committed.argv, dict(committed.env), dict(committed.mounts), now_unit.name if now_unit else "") if committed else None
    return ServicePlan(manager.name, manager.node, before, after, added, kept, tuple(files), unit, new.after if new else "", now_unit,
                       new.notes if new else ())  # fmt: skip


def _one_digest(deployment: str, digests: Sequence[str]) -> str:
    if len(set(digests)) != 1:
        raise flags.EditError(f"{deployment}: its services would run different configurations ({', '.join(digests)}); one group needs one")
    return digests[0]


def predict(manager: ServiceManager, argv: Sequence[str], env: Mapping[str, str], *, fits: bool = False) -> str:
    """Ask the deployment's own build, where it is installed, which digest these arguments give.

    ``fits``: also whether the model and the machine there can take them, as far as that is known without a weight being
    read.

    Raises:
        EditError: the build refuses the arguments; the text is its own.
        ServiceError: the command line is not ``PROGRAM... serve ARGS...``, or the build does not answer.
    """
    if "serve" not in argv:
        raise ServiceError(
            f"{manager.name}: its command line has no `serve`, so its flags cannot be told from the rest: {' '.join(argv[:4])}"
        )
    at = list(argv).index("serve")
    asked = (*argv[:at], "config", "--json", *(("--check",) if fits else ()), "--", *argv[at + 1 :])
    code, out, err = manager.run(("env", *(f"{key}={value}" for key, value in env.items()), *asked), _PREDICT_S)
    if code:
        said = err.strip() or out.strip() or f"exit status {code}"
        raise flags.EditError(f"{manager.name} on {manager.node}: refused by the build that is installed there: {said.splitlines()[-1]}")
    try:
        answer = json.loads(out)
        return str(answer["digest"] if "digest" in answer else answer["data"]["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{manager.name}: `{' '.join(asked[: at + 2])}` gave no digest: {error}") from error
