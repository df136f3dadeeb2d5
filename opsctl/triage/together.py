"""Many questions at once under one deadline. Who does not answer in time is a gap, never a wait."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any


class Late(Exception):
    """No answer within the deadline."""


def together(jobs: Mapping[str, Callable[[], Any]], until_s: float, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """What each job returned, or the exception that it raised; ``Late`` for one that is not done at ``until_s`` on the clock.

    The threads are daemons: one that hangs for good is left behind and keeps nobody.
    """
    came: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def work(name: str, job: Callable[[], Any]) -> None:
        try:
            came.put((name, job()))
        except Exception as error:  # it is the answer: whoever asked tells it
            came.put((name, error))

    for name, job in jobs.items():
        threading.Thread(target=work, args=(name, job), name=f"triage-{name}", daemon=True).start()
    found: dict[str, Any] = {}
    while len(found) < len(jobs):
        try:
            name, answer = came.get(timeout=max(0.001, until_s - clock()))
        except queue.Empty:
            break
        found[name] = answer
    return {name: found.get(name, Late("no answer within the deadline")) for name in jobs}
