"""Did somebody order that a server ends? Who did so is told once, and it pages nobody: a rollout proves, reverts and pages by
itself. An end that no look fell into is told of as well, when another start is seen in the place of the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from monitors import planned
from monitors.fleet import Deployment
from monitors.judge.progress import Judgement, State
from monitors.lookout import Look
from monitors.remote import Remote


class Orders:
    """Of one deployment. ``emit`` takes the event's name and its fields."""

    def __init__(self, deployment: Deployment, remotes: Mapping[str, Remote], emit: Callable[..., None]) -> None:
        self._deployment = deployment
        self._remotes = remotes
        self._emit = emit
        self._alive: frozenset[str] = frozenset()  # the invocations that were last seen to live
        self._told: tuple[str, str] | None = None  # the event and the invocation that were told of last

    def planned(self, look: Look, invocation: str) -> bool:
        """Whether the end of ``invocation`` was ordered."""
        found = planned.end(self._deployment, self._remotes, invocation)
        if found is None and look.ending.order is not None:
            found = planned.Planned("planned_end", f"it was told to stop: {look.ending.order.text[:160]}")
        if found is not None and (found.event, invocation) != self._told:
            self._emit(found.event, text=found.text)
        self._told = (found.event, invocation) if found is not None else None
        return found is not None

    def turn(self, look: Look, judgement: Judgement, *, tell: bool) -> None:
        """Once a look. ``tell``: a start that took another's place unseen is news, and no part of an incident that is open."""
        if judgement.state is State.unknown:
            return
        if judgement.state is State.ended:
            self._alive = frozenset()
            return
        self._told = None
        now = frozenset(look.sample.invocation.split("+")) - {""}
        gone, self._alive = self._alive - now, now
        # No line tells of a death here: that would have been a crash.
        if now and gone and tell and not self.planned(look, "+".join(sorted(gone))):
            self._emit("started_again", text="no look fell between; no order and no death of the former start is on record")
