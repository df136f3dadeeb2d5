"""A log that is piped in (``kubectl logs -f ... | hang-monitor run``): the service's ``log = "-"``.

A thread reads, so that a pipe without lines never holds up the watch. The end of the pipe is a gap: a follower that died
must not look like a server that is silent.
"""

from __future__ import annotations

import collections
import threading
from typing import BinaryIO

from monitors.observe.reading import Reading, gap

_MOST_WAITING = 50_000
_LONGEST_LINE_BYTES = 1 << 20


class Piped:
    """``poll`` gives the lines that have come since the last poll. Lines beyond what waits are dropped, oldest first."""

    def __init__(self, stream: BinaryIO) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MOST_WAITING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(stream,), name="stdin", daemon=True)
        self._thread.start()

    def _read(self, stream: BinaryIO) -> None:
        try:
            while line := stream.readline(_LONGEST_LINE_BYTES):
                self._lines.append(line)
        except (OSError, ValueError):
            pass  # closed under the reader: the same as its end, which poll tells
        self._ended.set()

    def poll(self) -> Reading[list[str]]:
        ended = self._ended.is_set()
        found = [self._lines.popleft() for _ in range(len(self._lines))]
        if not found and ended:
            return gap("standard input: the pipe has ended; whoever follows the log for the monitor is gone")
        return Reading([line.decode(errors="replace").rstrip("\n") for line in found])
