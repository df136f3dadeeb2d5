"""Ask a server's health routes. What it cannot see: whether generation works; a 200 is a statement of one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from monitors.judge.scene import Health
from monitors.observe import web


def ask(api: str, route: str, *, deadline_s: float, headers: Mapping[str, str] | None = None) -> Health:
    """GET a route. Status 0 stands for no answer within the deadline."""
    started = time.monotonic()
    status = 0
    with contextlib.suppress(OSError, ValueError):  # refused, reset, timed out or no HTTP: all are "no answer", which status 0 says
        status, _ = web.ask(f"{api}{route}", deadline_s=deadline_s, headers=headers)
    return Health(route, status, time.monotonic() - started)


def to_text(found: list[Health]) -> str:
    return "".join(f"GET {h.route} {h.status or 'no answer'} {h.seconds:.3f} s\n" for h in found)
