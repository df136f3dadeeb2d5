"""Waiting for something on a stage, under a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class StageError(RuntimeError):
    """The play could not go on; the text says at which step and why."""


def wait_for(condition: Callable[[], Any], deadline_s: float, what: str, *, poll_s: float = 0.05) -> Any:
    """The first true value of ``condition``. Raises StageError when none comes in time."""
    until = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise StageError(f"{what}: not within {deadline_s:g} s")
        time.sleep(poll_s)
    return found
