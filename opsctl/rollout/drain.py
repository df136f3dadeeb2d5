"""Taking a group out of its router before it is stopped, and putting it back.

What a router is told is the site's own: two commands of the fleet file (``drain``, ``undrain``), run on the group's own
machine, so that its dead-man can put it back without the operator. The journal says "draining" before the first is run
and "back" after the second: whoever takes up a rollout that was cut off knows what may be out. Both must bear being run
twice.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from opsctl.rollout.journal import Journal
from opsctl.rollout.plan import Drain
from opsctl.rollout.target import Target
from opsctl.service.manager import ServiceError, ServiceManager, State
from opsctl.service.wait import Deadline, Waiter

_SLACK_S = 5.0


@dataclass
class Drains:
    """Of one rollout. ``drains``: as its plan holds them."""

    drains: Sequence[Drain]
    managers: Sequence[ServiceManager]
    journal: Journal
    waiter: Waiter

    @property
    def is_out(self) -> tuple[Drain, ...]:
        """What may be out of its router now."""
        last: dict[str, str] = {e.data["service"]: e.event for e in self.journal.entries if e.event in ("draining", "back")}
        return tuple(one for one in self.drains if last.get(one.service) == "draining")

    def out(self, group: Target) -> None:
        """Raises ServiceError when its router does not let it go in time, OSError for the journal."""
        for manager, one in self._of(group):
            if one in self.is_out:
                continue
            self.journal.write(self.journal.state, "draining", group=group.managers[0].name, service=one.service)
            self.waiter.talk(f"taking {one.service} out of its router: {shlex.join(one.out)} (at most {one.deadline_s:g} s)")
            manager.set_undrain(one.back, one.deadline_s)
            self._run(manager, one.out, f"{one.service} to be drained", one.deadline_s)

    def back(self, group: Target) -> None:
        """Nothing happens for a group that is not out. Raises ServiceError when it cannot be put back."""
        for manager, one in self._of(group):
            if one not in self.is_out:
                continue
            self.waiter.talk(f"putting {one.service} back into its router: {shlex.join(one.back)}")
            self._run(manager, one.back, f"{one.service} to be put back", one.deadline_s)
            manager.set_undrain((), 0.0)
            self.journal.write(self.journal.state, "back", group=group.managers[0].name, service=one.service)

    def back_or_tell(self, group: Target) -> None:
        """On the way back, where a router that does not answer stops nothing: what is left is in ``left``."""
        try:
            self.back(group)
        except (ServiceError, OSError) as error:
            self.waiter.talk(f"NOT PUT BACK: {error}")

    def put_back(self, boot_s: float) -> str:
        """Whatever is out goes back once it is active; what is left, as ``left`` says it. The journal is not written: somebody
        may be taking the rollout up."""
        said = []
        for one in self.is_out:
            manager = next(manager for manager in self.managers if manager.name == one.service)
            try:
                self.waiter.until(f"{one.service} to be active", lambda m=manager: m.snapshot().state is State.active, boot_s)  # type: ignore[misc]
                self._run(manager, one.back, f"{one.service} to be put back", one.deadline_s)
            except ServiceError as error:
                said.append(f"{one.service} is STILL OUT OF ITS ROUTER ({error}); put it back there: {shlex.join(one.back)}")
        return "\n".join(said)

    @property
    def left(self) -> str:
        """What a person has to know at the end: what is still out, and how it is put back; empty when nothing is."""
        return "\n".join(f"{one.service} is STILL OUT OF ITS ROUTER; put it back there: {shlex.join(one.back)}" for one in self.is_out)

    def _of(self, group: Target) -> list[tuple[ServiceManager, Drain]]:
        by_name = {manager.name: manager for manager in group.managers}
        return [(by_name[one.service], one) for one in self.drains if one.service in by_name]

    def _run(self, manager: ServiceManager, argv: tuple[str, ...], what: str, deadline_s: float) -> None:
        """A command of the site's on the service's machine; the lease is kept alive meanwhile."""
        ended: list[tuple[int, str, str]] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                ended.append(manager.run(argv, deadline_s))
            except Exception as error:  # handed to the caller below
                errors.append(error)

        thread = threading.Thread(target=run, name=f"rollout: {what}", daemon=True)
        thread.start()
        try:
            self.waiter.until(what, lambda: not thread.is_alive(), deadline_s + _SLACK_S)
        except Deadline as error:
            raise ServiceError(f"{manager.name}: {shlex.join(argv)}: {error}") from error
        if errors:
            raise ServiceError(f"{manager.name}: {shlex.join(argv)}: {errors[0]}") from errors[0]
        code, out, err = ended[0]
        if code:
            said = (err or out).strip().splitlines()
            raise ServiceError(f"{manager.name}: {shlex.join(argv)}: exit status {code}{f': {said[-1][:200]}' if said else ''}")
