"""Ports for servers that a test starts under a number of its own choosing.

They come from below the kernel's ephemeral range: a port that ``bind(0)`` gave and that was closed again may be given
to anybody before the server under test binds it, most likely to that same server's other sockets.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

_FIRST = 15_000
_LAST = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 1
_chance = random.Random(os.getpid())
_given: set[int] = set()


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports in a row on 127.0.0.1 that are free, and that this process did not give out before."""
    for _ in range(1000):
        first = _chance.randint(_FIRST, _LAST - count)
        ports = range(first, first + count)
        if _given.intersection(ports):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            _given.update(ports)
            return first
    raise AssertionError(f"no {count} free ports in a row between {_FIRST} and {_LAST}")
