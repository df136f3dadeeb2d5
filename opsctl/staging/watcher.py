"""The hang monitor of a stage, and what it said."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from dataclasses import dataclass, field
from typing import Any

from opsctl.staging.waiting import StageError, wait_for


@dataclass
class Watcher:
    """``hang-monitor run --json`` and its events, in the order in which they came."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    _lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def news(self) -> list[dict[str, Any]]:
        """The events that came since the last call, by ``wait`` or by this. Raises StageError when the monitor has ended."""
        fresh: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                fresh.append(json.loads(self._lines.get_nowait()))
        self.events += fresh
        if self.process.poll() is not None:
            raise StageError(f"hang-monitor ended with {self.process.returncode}")
        return fresh

    def wait(self, name: str, deadline_s: float) -> dict[str, Any]:
        """The first event of this name, of all that came. Raises StageError when there is none in time."""

        def found() -> dict[str, Any] | None:
            self.news()
            return next((event for event in self.events if event["event"] == name), None)

        event: dict[str, Any] = wait_for(found, deadline_s, f"the monitor's event {name!r}")
        return event

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
