"""The receiving end of sd_notify(3): one abstract datagram socket for each invocation.

A fresh socket for each start means that a late datagram of the last start can never make the next one ready.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


@dataclass(frozen=True)
class Notice:
    """What one datagram said. Times are seconds; 0 when it said nothing of the kind."""

    ready: bool = False
    watchdog: bool = False
    stopping: bool = False
    extend_s: float = 0.0
    status: str = ""


def parse(text: str) -> Notice:
    said = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    microseconds = said.get("EXTEND_TIMEOUT_USEC", "")
    return Notice(
        ready=said.get("READY") == "1", watchdog=said.get("WATCHDOG") == "1", stopping=said.get("STOPPING") == "1",
        extend_s=int(microseconds) / 1e6 if microseconds.isdigit() else 0.0, status=said.get("STATUS", ""),
    )  # fmt: skip


class NotifySocket:
    def __init__(self, invocation_id: str) -> None:
        self.address = f"@opsctl/{invocation_id}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind("\0" + self.address[1:])

    def receive(self) -> list[Notice]:
        """All that has arrived, in order. Datagrams of other users are left out: an abstract socket has no mode."""
        found: list[Notice] = []
        while True:
            try:
                data, extra, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return found
            for level, kind, value in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    _, uid, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
                    if uid in (0, os.getuid()):
                        found.append(parse(data.decode(errors="replace")))

    def close(self) -> None:
        self.socket.close()
