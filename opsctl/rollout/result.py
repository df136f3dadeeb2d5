"""How a rollout ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from monitors.exit_codes import ExitCode
from opsctl.rollout.checks import Check, Outcome
from opsctl.rollout.journal import State

_CODES = {State.committed: ExitCode.DONE, State.reverted: ExitCode.REVERTED, State.stuck: ExitCode.STUCK, State.held: ExitCode.HELD}

_NEXT = {
    State.committed: "nothing to do; it is what a revert goes back to from now on. To take it back, roll the old values out again",
    State.reverted: "what ran before serves again; why is above, the whole record: opsctl rollout show {id}",
    State.held: "look at what could not be told, then opsctl rollout resume, or opsctl rollout abort; else it reverts by itself",
    State.stuck: "LOOK NOW, it is not known that anybody is served: opsctl rollout status, opsctl triage; opsctl rollout abort tries the "
    "revert again",
}


class Page(msgspec.Struct, frozen=True):
    """``sent`` None: none was due."""

    sent: bool | None = None
    reason: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``moments``: seconds since the rollout began, by name; ``without_service_s`` lies between the stop of the
    group and its first good answer after it (None: it gave none). ``ordered``: an abort was what somebody asked for."""

    id: str
    deployment: str
    state: State
    why: str
    edits: tuple[str, ...]
    checks: tuple[Check, ...]
    revert_checks: tuple[Check, ...]
    page: Page
    moments: dict[str, float]
    without_service_s: float | None
    interrupted: bool = False
    ordered: bool = False

    @property
    def as_ordered(self) -> bool:
        """Whether somebody told it to go back, and it did."""
        return self.ordered and self.state is State.reverted

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted and self.state is State.reverted:
            return ExitCode.INTERRUPTED
        code = _CODES[self.state]
        return ExitCode.INTERNAL if code is ExitCode.DONE and self.page.sent is False else code

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {**found, "page_sent": self.page.sent, "exit_code": int(self.exit_code)}

    def text(self) -> str:
        ended = "reverted as ordered, and the revert is verified" if self.as_ordered else self.state
        lines = [f"rollout {self.id} of {self.deployment}: {ended}{f' ({self.why})' if self.why else ''}"]
        for title, checks in (("", self.checks), ("revert ", self.revert_checks)):
            lines += [f"  {title + check.name:<20} {check.outcome:<12} {check.evidence}" for check in checks]
        for check in self.checks:
            if check.outcome is Outcome.failed:
                lines += [f"    | {line}" for trace in check.data.get("tracebacks", ()) for line in trace.splitlines()]
        lines += [f"  {name:<26} {at:8.2f} s" for name, at in sorted(self.moments.items(), key=lambda item: item[1])]
        if self.without_service_s is not None:
            lines.append(f"  without service for {self.without_service_s:.2f} s")
        if self.page.sent is not None:
            lines.append("  paged" if self.page.sent else f"  A PAGE WAS DUE AND DID NOT GO OUT: {self.page.reason}")
        lines.append(f"next: {_NEXT[self.state].format(id=self.id)}")
        return "\n".join(lines)


def without_service(moments: Mapping[str, float]) -> float | None:
    """Seconds in which nobody was served: from the stop to the first good answer, and from a failure to the first
    good answer of the revert. None when there was no good answer at the end, or nothing was stopped."""
    gone = moments.get("group stopping")
    if gone is None:
        return None
    answered, back = moments.get("first good answer"), moments.get("revert: first good answer")
    if "revert begun" not in moments:
        return None if answered is None else round(answered - gone, 3)
    if back is None:
        return None
    if answered is None:
        return round(back - gone, 3)
    return round(answered - gone + back - moments.get("failure known", moments["revert begun"]), 3)
