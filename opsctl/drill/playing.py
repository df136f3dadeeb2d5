"""One drill under way: what the monitor said, who was paged, and when. Every moment is a stamp of one monotonic clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from opsctl.drill.score import Score, Taken
from opsctl.drill.stage import Stage, Traffic
from opsctl.playbooks.schema import Drill, Playbook
from opsctl.runbooks.run import RunRecord
from opsctl.staging.waiting import StageError, wait_for

_POLL_S = 0.1
_VERDICT = re.compile(r"^(\w+)  \(confidence ", re.MULTILINE)
_NEWS = ("over:", "restarting:")  # titles of what is told to people and asks nothing of them


@dataclass(frozen=True)
class Deadlines:
    """How long each moment is waited for, in seconds: beyond any target."""

    detect_s: float = 60.0
    capture_s: float = 90.0
    mitigate_s: float = 120.0
    recover_s: float = 120.0


class Responder(Protocol):
    """Who acts on a page: the runbook by itself, or a person."""

    @property
    def mode(self) -> str: ...

    def respond(self, playing: Playing) -> None:
        """Do what restores service; fill in the score's steps and false moves."""
        ...


@dataclass
class Playing:
    """``begun``: the monotonic second of the injection; ``named``: of the last verdict that was new; ``before``: the
    configuration that the server was verified with, and ``back``: when it was first seen to have it again."""

    playbook: Playbook
    stage: Stage
    talk: Callable[[str], None]
    score: Score
    traffic: Traffic
    deadlines: Deadlines
    begun: float = 0.0
    named: float = 0.0
    before: str = ""
    back: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def drill(self) -> Drill:
        assert self.playbook.drill is not None
        return self.playbook.drill

    def aside(self, text: str) -> None:
        """Say what somebody on call would not be told."""
        if self.score.mode == "auto":
            self.talk(text)

    def since(self) -> float:
        """Seconds after the injection."""
        return round(time.monotonic() - self.begun, 2)

    def stamp(self, name: str, at: float | None = None) -> None:
        """Note a moment, once. ``at``: a monotonic second; now where none is given."""
        if getattr(self.score.moments, name) is None:
            setattr(self.score.moments, name, self.since() if at is None else round(at - self.begun, 2))
            self.talk(f"{getattr(self.score.moments, name):6.1f} s  {name}")

    def look(self) -> None:
        """Take in what the monitor said and who was paged."""
        for event in self.stage.watcher.news():
            self.events.append(event)
            if event["event"] == "error":
                self.talk(f"        the monitor says: {event.get('text', 'an error')}")
            if event.get("mono_s", 0.0) < self.begun:  # not every event tells its moment
                continue
            if event["event"] == "captured":
                self.stamp("captured", event["mono_s"])
            elif event["event"] == "verdict":
                self._verdict(event["verdict"], event["mono_s"], f"confidence {event['confidence']:.2f}")
            elif event["event"] == "page" and event.get("page_sent") and not self.stage.own:
                self._paged(event["mono_s"], str(event.get("title", "page")), str(event.get("text", "")))
        if self.stage.callers is not None and (found := self.stage.callers.verdict()):
            self._verdict(found, time.monotonic(), "by the clients' own way")
        while self.stage.pages:
            self._paged(*self.stage.pages.pop(0))

    def _verdict(self, name: str, at: float, how: str) -> None:
        if name in self.score.verdicts:
            return
        self.named = at
        self.score.verdicts.append(name)
        self.aside(f"        verdict: {name} ({how})")

    def _paged(self, at: float, title: str, text: str) -> None:
        if at < self.begun:
            self.score.false_moves.append(f"a page before anything was injected: {title}")
            return
        if title.startswith(_NEWS):
            self.talk(f"        told: {title}")
            return
        self.score.paged += 1
        self.stamp("detected", at)
        self.talk(f"        PAGE: {title}")
        if self.score.mode != "auto":
            self.talk("\n".join(f"          {line}" for line in text.splitlines()))

    @property
    def bundle(self) -> str:
        """The last one that was taken."""
        return next((str(event["bundle"]) for event in reversed(self.events) if event["event"] == "captured"), "")

    @property
    def is_named(self) -> bool:
        """Whether the monitor has said all that it owes."""
        return bool(self.score.verdicts) and set(self.drill.also) <= set(self.score.verdicts)

    @property
    def seen(self) -> float:
        """The monotonic second from which what is good again counts: all that was wrong had been seen by then."""
        moments = self.score.moments
        first = self.begun + (moments.detected or moments.captured or 0.0)
        return max(first, self.named) if self.drill.also else first

    def good(self) -> float | None:
        """The monotonic second of the first good answer after all was seen. Where a configuration was wrong and the client
        cannot tell, it comes from the one before: the good minute of a loop is none. Where answers came and were wrong, it
        equals, beside others, the one that was recorded at rest."""
        if self.drill.by_hand is not None and not self.traffic.discerns:
            self.back = 0.0 if self.stage.configuration() != self.before else self.back or time.monotonic()
            return self.traffic.good_after(max(self.seen, self.back)) if self.back else None
        if not self.drill.canary:
            return self.traffic.good_after(self.seen)
        right = (event["mono_s"] for event in self.events if event["event"] == "canary" and event["answer"] == "same" and event["loaded"])
        return min((at for at in right if at > self.seen), default=None)

    def until(self, condition: Callable[[], Any], deadline_s: float) -> bool:
        """Look on until it holds. False when it does not in time."""

        def held() -> bool:
            self.look()
            return bool(condition())

        try:
            return bool(wait_for(held, deadline_s, "", poll_s=_POLL_S))
        except StageError:
            return False

    def ran(self, record: RunRecord) -> None:
        """A runbook was gone through: what of it ran, and what that was worth."""
        score = self.score
        score.fidelity = record.fidelity
        for step in record.steps:
            score.steps.append(Taken(record.runbook, step.name, step.outcome, step.seconds, step.exit_code, step.why))
            self.talk(f"        {step.name}: {step.outcome} ({step.seconds:.1f} s){f' {step.why}' if step.why else ''}")
            if step.outcome == "failed":
                score.false_moves.append(f"{step.name}: {step.why}")
            if step.command.startswith("opsctl capture") and (found := _VERDICT.search(step.said)):
                score.recaptured.append(found[1])
            if "rollout apply" in step.command and step.outcome == "passed":
                self.stage.changed = True
