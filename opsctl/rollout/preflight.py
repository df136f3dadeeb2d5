"""What forbids a change before anything is touched, and what could not be found out."""

from __future__ import annotations

from opsctl.rollout import buildhelp, flags, unitfile, upgrade
from opsctl.rollout.plan import Plan
from opsctl.rollout.target import Target
from opsctl.rollout.wish import Wish
from opsctl.service import listener
from opsctl.service.manager import ServiceError

_LOOK_S = 20.0


def of_services(target: Target) -> list[str]:
    """Why these services must not be changed now. Raises ServiceError for one that cannot be asked."""
    problems = [problem for manager in target.managers for problem in manager.preflight()]
    for group in target.groups:
        serves = group.serves
        if group.port and not serves.snapshot().main_pid:  # while it runs, whoever listens is itself
            problems += [
                f"{serves.name}: does not run, and port {group.port} on {serves.node} is held by {holder}; end that process first"
                for holder in listener.holders(serves, group.port)
            ]
    return problems


def of_change(target: Target, wish: Wish, made: Plan) -> list[str]:
    """Why this change cannot be right. Raises ServiceError for a machine that cannot be asked."""
    problems = []
    if wish.failure_budget < 0 or (wish.failure_budget and len(target.groups) == 1):
        problems.append(
            f"--failure-budget {wish.failure_budget}: {target.name} has {len(target.groups)} replica(s), and the first may never fail; "
            "give a number of at least 0, and more than 0 only where the fleet file has several (replica = ...)"
        )
    ports = {group.port for group in target.groups}
    for edit in wish.edits:
        if edit.flag == "port" and not edit.unset and edit.value != (str(target.port) if len(ports) == 1 else None):
            problems.append(
                f"{edit}: the fleet file says that callers and probes find the API at {target.api}; a server on another port is down for "
                "them. Change the fleet file (and the callers) first, or leave the port"
            )
    for manager, service in zip(target.managers, made.services, strict=True):
        for one in wish.overlays:
            if manager.image():
                problems.append(
                    f"--overlay: {manager.name} runs a container, which sees nothing of what is mounted outside; give it a volume"
                )
            elif manager.run(("test", "-e", one.target), _LOOK_S)[0]:
                problems.append(f"--overlay: {manager.name} has no {one.target} on {manager.node} to mount over; is the path right?")
        if wish.package or wish.model or wish.image:
            before = manager.image()
            problems += upgrade.missing(manager, service.before.argv, service.after.argv, before, wish.image or before)
    return problems


def of_unit_files(target: Target, wish: Wish) -> tuple[list[str], tuple[str, ...]]:
    """What the nodes' own systemd says against the new unit files, and what could not be asked."""
    problems, notes = [], []
    for manager in target.managers:
        wanted = unitfile.wished(wish.unit_files, manager)
        if wanted is not None:
            found, why = unitfile.problems(wanted, manager)
            problems += found
            notes += [f"{wanted}: not checked beforehand: {why}"] if why else []
    unmeant = [one for one in wish.unit_files if not any(one.meant_for(manager) for manager in target.managers)]
    names = ", ".join(manager.name for manager in target.managers)
    problems += [f"{one}: {target.name} has no such service; it has {names}" for one in unmeant]
    return problems, tuple(dict.fromkeys(notes))


def unknown_flags(target: Target, wish: Wish, made: Plan) -> tuple[str, ...]:
    """What could not be checked of the flags, where the engine does not check them itself.

    Raises EditError for a flag that the build of some service does not know."""
    if target.speaks_digest or not wish.edits:
        return ()
    notes, asked = [], set()
    for manager, service in zip(target.managers, made.services, strict=True):
        program = (manager.node, service.after.argv[:2])
        if program in asked:
            continue
        asked.add(program)
        if manager.image():
            notes.append(f"{manager.name}: the flags of a build inside a container are not checked beforehand")
            continue
        try:
            buildhelp.refuse_unknown(manager, service.after.argv, wish.edits)
        except flags.EditError:
            raise
        except ServiceError as error:
            notes.append(f"flags are not checked beforehand: {error}")
    return tuple(notes)
