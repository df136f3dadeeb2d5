"""Follow a log file through appends, rotation and truncation, on this machine or another."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from monitors.observe import onnode
from monitors.observe.reading import Reading, gap
from monitors.remote import Asked, NodeError

_POLL_BYTES = 1 << 20
_LONGEST_REST = 64 << 10  # of a line that is not ended: what has no end must not fill the memory


@dataclass
class Follower:
    """``poll`` gives the whole lines that were added since the last poll. The first poll gives the last lines that
    the file has, so that a monitor that starts late knows the state. A line that is still being written waits."""

    path: str
    remote: Asked
    deadline_s: float = 5.0
    first_bytes: int = 64 << 10
    _offset: int | None = None
    _inode: int = 0
    _rest: bytes = field(default=b"", repr=False)
    skipped_bytes: int = 0

    def poll(self) -> Reading[list[str]]:
        limit = self.first_bytes if self._offset is None else _POLL_BYTES
        try:
            if self.remote.local:
                answer = onnode.follow(self.path, self._offset, self._inode, limit)
            else:
                answer = self.remote.collect("follow", self.deadline_s, path=self.path, offset=self._offset, inode=self._inode, limit=limit)
        except OSError as error:
            return gap(f"{self.path}: {error.strerror or error}")
        except NodeError as error:
            return gap(str(error))
        data = base64.b64decode(answer["data"])
        first = self._offset is None
        if answer["inode"] != self._inode or (self._offset or 0) > answer["offset"] or answer["gap"]:
            self._rest = b""  # another file, or a hole: half a line of before does not belong to what follows
        self.skipped_bytes += 0 if first else answer["gap"]
        self._offset, self._inode = answer["offset"], answer["inode"]
        *whole, rest = (self._rest + data).split(b"\n")
        if first and answer["offset"] > len(data) and whole:
            whole = whole[1:]  # the first read began in mid-line
        # A progress bar rewrites one line for minutes and never ends it: its last whole state is a line, or a server
        # that loads would look silent. A carriage return at the very end may be half of a line's end.
        states, last_return, self._rest = rest.rpartition(b"\r")
        if last_return and not self._rest:
            states, self._rest = b"", rest[-_LONGEST_REST:]
        elif states.strip():
            whole.append(states.rsplit(b"\r", 1)[-1])
        self._rest = self._rest[-_LONGEST_REST:]
        return Reading([line.decode(errors="replace") for line in whole])


def tail(remote: Asked, path: str, *, limit: int, deadline_s: float) -> Reading[bytes]:
    """The last bytes of a file."""
    try:
        return Reading(base64.b64decode(remote.collect("follow", deadline_s, path=path, limit=limit)["data"]))
    except NodeError as error:
        return gap(str(error))
