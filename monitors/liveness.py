"""Is the monitor itself alive? systemd's watchdog and an external heartbeat hear of it only while every watch looks."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monitors import fleet
from monitors.sdnotify import Notifier

_STUCK_S = 45.0  # longer than the slowest look: a node that does not answer costs deadlines
_FETCH_S = 10.0


class Liveness:
    """``turn`` is called every half second or so by the main thread."""

    def __init__(
        self, notifier: Notifier, heartbeat: fleet.Heartbeat, emit: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._notifier = notifier
        self._heartbeat = heartbeat
        self._emit = emit
        self._clock = clock
        self._looked: dict[str, tuple[str, float]] = {}
        self._ready = False
        self._told_s = self._beat_s = -1e9
        self._why = ""

    def turn(self, statuses: Sequence[Mapping[str, Any]]) -> bool:
        """Whether every watch has looked lately."""
        now = self._clock()
        for status in statuses:
            name, looked = str(status["deployment"]), str(status.get("looked_utc", ""))
            if looked and self._looked.get(name, ("", 0.0))[0] != looked:
                self._looked[name] = (looked, now)
        alive = bool(statuses) and all(
            str(s["deployment"]) in self._looked and now - self._looked[str(s["deployment"])][1] < _STUCK_S for s in statuses
        )
        if not alive:
            return False
        if not self._ready:
            self._ready = True
            self._notifier.tell("READY=1")
        if now - self._told_s >= (self._notifier.due_s or 10.0):
            self._told_s = now
            words = ", ".join(f"{s['deployment']} {s['state']}" for s in statuses)
            self._notifier.tell("WATCHDOG=1", f"STATUS={words}")
        if self._heartbeat.url and now - self._beat_s >= self._heartbeat.every_s:
            self._beat_s = now
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return True

    def _beat(self) -> None:
        try:
            with urllib.request.urlopen(self._heartbeat.url, timeout=_FETCH_S):
                why = ""
        except (OSError, ValueError) as error:
            why = f"{type(error).__name__}: {getattr(error, 'reason', None) or error}"
        if why != self._why:  # told when it changes, not each minute
            self._why = why
            self._emit({"event": "heartbeat", "ok": not why, "reason": why})

    def stopping(self) -> None:
        self._notifier.tell("STOPPING=1")
