"""Ask a server's health routes. What it cannot see: whether generation works; a 200 is a statement of one process."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from monitors.judge.scene import Health


def ask(api: str, route: str, *, deadline_s: float, headers: Mapping[str, str] | None = None) -> Health:
    """GET a route. Status 0 stands for no answer within the deadline."""
    started = time.monotonic()
    status = 0
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{api}{route}", headers=dict(headers or {})), timeout=deadline_s) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
    except (OSError, ValueError):
        pass  # refused, reset, timed out or no HTTP: all of them are "no answer", which status 0 says
    return Health(route, status, time.monotonic() - started)


def to_text(found: list[Health]) -> str:
    return "".join(f"GET {h.route} {h.status or 'no answer'} {h.seconds:.3f} s\n" for h in found)
