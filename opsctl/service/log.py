"""The log file of an embedded service, with an account of which bytes belong to which invocation.

The supervisor copies the command's output into the file through one pipe for each invocation. So a process of the
last start that writes late is still booked under the last start, and the file itself holds the engine's lines as
they were written: no prefix, nothing between the halves of a line.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from opsctl.service.manager import Line
from opsctl.service.record import Span

MANAGER = "[opsctl] "
_LOST = re.compile(re.escape(MANAGER) + r"\d+ bytes of the log could not be written")
KEPT_SPANS = 200
_LONGEST_LINE = 64 * 1024


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class ServiceLog:
    """The writer. ``spans`` is shared with the state record; ``moved`` says that it changed and must be saved. ``utc`` gives
    the time that stands behind each line of the supervisor's own."""

    def __init__(self, path: Path, spans: list[Span], utc: Callable[[], str] = _now) -> None:
        self._utc = utc
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.spans = spans
        self.moved = False
        self._lost = 0
        self._held: dict[str, bytes] = {}
        end = os.fstat(self._descriptor).st_size
        for span in spans:
            if span.end < 0:
                span.end = end

    def output(self, invocation_id: str, data: bytes) -> None:
        """Bytes of the command. Whole lines are written; a half line waits for its end."""
        data = self._held.pop(invocation_id, b"") + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) >= _LONGEST_LINE:
            cut = len(data)
        if data[cut:]:
            self._held[invocation_id] = data[cut:]
        if cut:
            self._write(invocation_id, data[:cut])

    def end(self, invocation_id: str) -> None:
        """The pipe has closed: a half line is written as it is."""
        rest = self._held.pop(invocation_id, b"")
        if rest:
            self._write(invocation_id, rest + b"\n")

    def say(self, invocation_id: str, text: str) -> None:
        """A line of the supervisor's own about this invocation."""
        self._write(invocation_id, f"{MANAGER}{text} ({self._utc()})\n".encode())

    def _write(self, invocation_id: str, data: bytes) -> None:
        if not self.spans or self.spans[-1].invocation_id != invocation_id:
            start = os.fstat(self._descriptor).st_size
            if self.spans:
                self.spans[-1].end = start
            self.spans.append(Span(invocation_id, start))
            del self.spans[:-KEPT_SPANS]
            self.moved = True
        if self._lost:
            data = f"{MANAGER}{self._lost} bytes of the log could not be written.\n".encode() + data
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
            self._lost = 0
        except OSError:  # a full disk must not stop the service; the gap is said as soon as there is room
            self._lost += len(view)

    def close(self) -> None:
        if self.spans and self.spans[-1].end < 0:
            self.spans[-1].end = os.fstat(self._descriptor).st_size
            self.moved = True
        os.close(self._descriptor)


def read(path: Path, spans: list[Span], invocation_id: str) -> tuple[Line, ...]:
    """The lines of one invocation. A file that was cut short by others gives what is left of them."""
    parts = []
    try:
        with path.open("rb") as file:
            for span in spans:
                if span.invocation_id == invocation_id:
                    file.seek(span.start)
                    parts.append(file.read(span.end - span.start if span.end >= 0 else -1))
    except FileNotFoundError:
        return ()
    lines = b"".join(parts).decode(errors="replace").splitlines()
    return tuple(Line(text.removeprefix(MANAGER), manager=text.startswith(MANAGER), lost=bool(_LOST.match(text))) for text in lines)
