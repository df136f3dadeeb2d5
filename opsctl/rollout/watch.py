"""Eyes on a group of services while something else goes on: whatever ends a frozen invocation is known at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from monitors.capture.redact import redact
from opsctl.rollout.traces import tracebacks
from opsctl.service import together
from opsctl.service.manager import Line, ServiceError, ServiceManager, Snapshot, State
from opsctl.service.wait import Waiter

_T = TypeVar("_T")
_TAIL = 60
_WORD = 240  # characters of what a server said last


class Crash(Exception):
    """A start that was frozen has ended. ``evidence``: what was seen, the log's tail and whole tracebacks."""

    def __init__(self, service: str, invocation_id: str, what: str, tail: Sequence[str], traces: Sequence[str]) -> None:
        super().__init__(f"{service}: {what}")
        self.evidence: dict[str, Any] = {
            "service": service, "invocation_id": invocation_id, "what": what, "log_tail": list(tail), "tracebacks": list(traces),
        }  # fmt: skip


class Alarm(Exception):
    """Who watches beside the checks has found what ends them; the text says what."""


def _silent() -> str:
    return ""


@dataclass
class Watch:
    """``frozen``: the first snapshot of each service's invocation, by name. ``alarm``: asked in every wait; what it says
    ends the wait (empty: nothing)."""

    managers: Sequence[ServiceManager]
    frozen: Mapping[str, Snapshot]
    waiter: Waiter
    alarm: Callable[[], str] = _silent

    def look(self) -> None:
        """Raises Crash when a service is no longer in the start that was frozen."""
        found = together.snapshots(self.managers)
        for manager in self.managers:
            first = self.frozen[manager.name]
            what = _ended(first, found[manager.name])
            if what:
                self._raise(manager, first.invocation_id, what)

    def crash_behind(self, seconds: float) -> Crash | None:
        """The end of a service that explains why something failed just now, looked for a moment: a connection breaks
        before the service manager has seen its process end."""
        until = self.waiter.clock.monotonic() + seconds
        while True:
            try:
                self.look()
            except Crash as crash:
                return crash
            if self.waiter.clock.monotonic() >= until:
                return None
            self.waiter.clock.sleep(self.waiter.poll_s)

    def _raise(self, manager: ServiceManager, invocation_id: str, what: str) -> None:
        try:
            lines = manager.log(invocation_id)
        except (ServiceError, OSError) as error:
            raise Crash(manager.name, invocation_id, f"{what}; its log cannot be read: {error}", (), ()) from error
        traces = tracebacks(lines)
        said = [line.text for line in lines if line.manager and "exited" in line.text]
        why = "; ".join([what, *said[-1:], *_last_word(lines, traces)])
        raise Crash(manager.name, invocation_id, why, [line.text for line in lines[-_TAIL:]], traces)

    def until(self, what: str, done: Callable[[], bool], deadline_s: float) -> None:
        """Wait for ``done``. Raises Crash, Alarm, Deadline."""

        def checked() -> bool:
            self.look()
            if said := self.alarm():
                raise Alarm(said)
            return done()

        self.waiter.until(what, checked, deadline_s)

    def during(self, what: str, call: Callable[[], _T], deadline_s: float) -> _T:
        """The result of a call that may hang, watched meanwhile; looked at once more when it has returned.

        The call runs in a thread, which is left to its own time limit when the service ends first.
        Raises Crash, Alarm, Deadline, and what the call raises.
        """
        results: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:  # handed to the caller below
                errors.append(error)

        self.look()
        thread = threading.Thread(target=run, name=f"rollout: {what}", daemon=True)
        thread.start()
        thread.join(self.waiter.poll_s)
        if thread.is_alive():
            self.until(what, lambda: not thread.is_alive(), deadline_s)
        thread.join()
        self.look()
        if errors:
            raise errors[0]
        return results[0]


def _last_word(lines: Sequence[Line], traces: Sequence[str]) -> list[str]:
    """Why it ended, in its own words: the exception of its last traceback, else the last line that it wrote."""
    own = [line.text for line in lines if not line.manager and line.text.strip()]
    word = traces[-1].splitlines()[-1] if traces else own[-1] if own else ""
    return [f"it said: {redact(word.strip()[:_WORD], 'server.log')[0]}"] if word else []


def _ended(first: Snapshot, now: Snapshot) -> str:
    if now.waiting_to_restart:
        return f"the main process ended ({now.result}) and waits to be restarted"
    if now.invocation_id != first.invocation_id:
        return f"invocation {first.invocation_id[:8]} has ended; {now.invocation_id[:8] or 'none'} runs in its place"
    if now.container_id and first.container_id and now.container_id != first.container_id:
        return f"container {first.container_id[:12]} has ended; {now.container_id[:12]} runs in its place"
    if now.state in (State.failed, State.inactive, State.deactivating):
        return f"the service is {now.state} ({now.result})"
    if first.main_pid and now.main_pid != first.main_pid:
        return f"the main process {first.main_pid} has ended"
    if now.restarts != first.restarts:
        return f"the count of automatic restarts went from {first.restarts} to {now.restarts}"
    return ""
