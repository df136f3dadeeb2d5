"""What the way forward and the way back of one rollout share: its journal, its clock, its proofs, who is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opsctl.rollout import boots
from opsctl.rollout.boots import Boot
from opsctl.rollout.checks import Check
from opsctl.rollout.drain import Drains
from opsctl.rollout.journal import Journal, State
from opsctl.rollout.keeper import Keeper
from opsctl.rollout.plan import Plan
from opsctl.rollout.probe import Api
from opsctl.rollout.proof import Expectation, Proof
from opsctl.rollout.result import Page
from opsctl.rollout.scope import Scope
from opsctl.rollout.target import Target
from opsctl.rollout.verified import Verified
from opsctl.service import listener, wait
from opsctl.service.manager import Lease, ServiceError, Snapshot, Unreachable
from opsctl.service.wait import Deadline, Waiter

_BEGIN_S = 30.0
_PORT_S = 5.0  # how long a listener may take to vanish after its service has stopped


class Pager(Protocol):
    def page(self, title: str, body: str, key: str) -> Page: ...


class PortHeld(ServiceError):
    """The service has stopped and its port is still taken: the next start cannot bind it."""


@dataclass
class Course:
    """One rollout of a target. ``api``: gives the API of a group. ``baseline``: the revert target. ``frozen``: the
    start of each service that is looked at, by name."""

    target: Target
    journal: Journal
    api: Callable[[Target], Api]
    lease: Lease
    baseline: Verified
    pager: Pager
    waiter: Waiter
    utc: Callable[[], str]
    frozen: dict[str, Snapshot] = field(default_factory=dict)
    moments: dict[str, float] = field(default_factory=dict)
    page: Page = field(default_factory=Page)
    plan: Plan = field(init=False)
    keeper: Keeper = field(init=False)
    expected: Expectation = field(init=False)
    drains: Drains = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.journal.plan
        self._start = self.waiter.clock.monotonic()
        self.keeper = Keeper(self.target.managers, self.lease, self.waiter.clock.monotonic, self.waiter.talk)
        self.waiter = Waiter(
            self.waiter.talk, self.keeper.renew, self.waiter.clock, self.waiter.poll_s, self.waiter.say_every_s, self._status
        )
        self.drains = Drains(self.plan.drains, self.target.managers, self.journal, self.waiter)
        known: list[str] = next((e.data["known_exceptions"] for e in self.journal.entries if "known_exceptions" in e.data), [])
        self.expected = Expectation(self.plan.digest_after, {s.name: s.after for s in self.plan.services}, frozenset(known))

    def talk(self, text: str) -> None:
        self.waiter.talk(text)

    def _status(self) -> str:
        """What the services say of themselves: how far a boot is."""
        said = []
        for manager in self.target.managers:
            with contextlib.suppress(ServiceError):
                text = manager.snapshot().status
                said += [f"{manager.name}: {text}"] if text else []
        return "; ".join(said)

    def cycle(self, group: Target, which: str, *, strict: bool) -> None:
        """Stop a whole group, then start it, and freeze its starts. ``strict``: a port that somebody else holds and a router
        that does not let the group go are errors; else they are told, and the start is tried all the same. Raises
        Deadline, PortHeld and service errors."""
        try:
            self.drains.out(group)
        except (ServiceError, OSError) as error:
            if strict:
                raise
            self.talk(f"not drained: {error}")
        self.mark(f"{which}group stopping")
        self.talk(f"stopping {', '.join(m.name for m in group.managers)} (it may drain for {self.plan.times.stop_s:g} s)")
        wait.stop(group.managers, self.waiter, self.plan.times.stop_s)
        try:
            self._port_is_free(group)
        except PortHeld as error:
            if strict:
                raise
            self.talk(str(error))
        self.talk("starting")
        self.frozen |= wait.start(group.managers, self.waiter, _BEGIN_S)
        self.mark(f"{which}group started")

    def _port_is_free(self, group: Target) -> None:
        held: list[tuple[str, ...]] = [()]

        def free() -> bool:
            held[0] = listener.holders(group.serves, group.port) if group.port else ()
            return not held[0]

        try:
            self.waiter.until(f"port {group.port} of {group.serves.node} to be free", free, _PORT_S)
        except Deadline:
            raise PortHeld(
                f"{group.serves.name}: stopped, and port {group.port} on {group.serves.node} is still held by {'; '.join(held[0])}: "
                "an orphan of an earlier start, or somebody else's; end it"
            ) from None

    def proof(self, group: Target, expected: Expectation, scope: Scope | None, answered: str) -> Proof:
        """``answered``: the moment that the first good completion is noted as."""
        frozen = {manager.name: self.frozen[manager.name] for manager in group.managers}
        return Proof(group, expected, frozen, self.api(group), self.waiter, answer_s=self.plan.times.answer_s,
                     first_answer=lambda: self.first(answered), scope=scope)  # fmt: skip

    def note_boot(self, check: Check, digest: str, by: str) -> None:
        """Called once the start is proven: a boot that led nowhere is no measure."""
        if "seconds" in check.data:
            try:
                boots.add(self.journal.path.parent, Boot(at_utc=self.utc(), seconds=check.data["seconds"], digest=digest, by=by))
            except (ServiceError, OSError) as error:
                self.talk(f"the boot's time could not be recorded: {error}")

    def write(self, state: State, event: str = "", **data: Any) -> None:
        """Ahead of what it announces. Raises OSError."""
        self.journal.write(state, event, **data)

    def note(self, state: State, why: str, event: str = "", **data: Any) -> None:
        """On the way back a journal that cannot be written is said and does not stop the revert."""
        try:
            self.journal.write(state, event, why=why, **data)
        except OSError as error:
            self.talk(f"{self.journal.path}: cannot be written: {error}")

    def tell(self, what: str, body: str) -> None:
        title = f"{self.target.name}: rollout {what}"
        body += f"\n{self.drains.left}" if self.drains.left else ""
        self.page = self.pager.page(title, f"{body}\nrollout {self.journal.id}: {' '.join(self.plan.edits)}", self.journal.id)
        self.talk("paged" if self.page.sent else f"no page went out: {self.page.reason}")

    def now(self) -> float:
        return round(self.waiter.clock.monotonic() - self._start, 3)

    def mark(self, name: str) -> None:
        self.moments[name] = self.now()

    def first(self, name: str) -> None:
        self.moments.setdefault(name, self.now())

    def foreign(self) -> str:
        """What somebody else has changed since this rollout began; empty when all is either as it was or as planned."""
        found = []
        for manager, service in zip(self.target.managers, self.plan.services, strict=True):
            try:
                now = manager.read_change()
            except Unreachable:
                continue
            if now.committed not in (service.override_before(), service.override()) or now.trial not in (None, service.override()):
                found.append(manager.name)
        return f"{', '.join(found)}: changed by somebody else since this rollout began; nothing was touched" if found else ""

    def touched(self) -> tuple[Target, ...]:
        """The groups that may run the change: those whose restart the journal announces."""
        names = {entry.data.get("group", "") for entry in self.journal.entries if entry.state is State.restarted}
        return tuple(group for group in self.target.groups if "" in names or group.managers[0].name in names)

    @property
    def overrides_before(self) -> Mapping[str, Any]:
        return {service.name: service.override_before() for service in self.plan.services}
