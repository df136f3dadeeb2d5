"""Connections before and between requests: how many there may be, and how long one may say nothing.

uvicorn waits for ever for a connection's first byte and for the rest of a head, and takes connections until the process
has no descriptor left. Here a head must be whole within ``HEAD_TIMEOUT_S``. Where no more connections fit, the one that
has been without a request for the longest makes room, so that who opens many and says nothing keeps nobody out; if all
have a request, the newcomer gets 503.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 20.0
_MOST = 8192
_SELDOM_S = 10.0
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BODY = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"too_many_connections"}}'
_FULL = (b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
         b"content-length: %d\r\n\r\n%b") % (len(_BODY), _BODY)  # fmt: skip


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to what it may be at most; the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_connections(descriptors: int, requests: int) -> int:
    """How many connections fit: half of the descriptors, for asyncio accepts a backlog of them before it asks for the
    first; and no more than serves ``requests``, the most that may be in flight, with health probes beside them."""
    wanted = max(_MOST, 2 * requests)
    return wanted if descriptors == resource.RLIM_INFINITY else max(min(wanted, descriptors // 2), 1)


class Seldom:
    """A warning that is logged at most once in 10 s, with how often it was held back in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = float("-inf")
        self._held = 0

    def warn(self, text: str) -> None:
        now = self._clock()
        if now < self._quiet_until:
            self._held += 1
            return
        log.warning("%s%s", text, f" ({self._held} more times since it was last said)" if self._held else "")
        self._quiet_until, self._held = now + _SELDOM_S, 0


class Gate:
    """Shared by all connections of a server. ``idle``: those without a request, the longest idle first."""

    def __init__(self, most: int, *, head_timeout_s: float = HEAD_TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.head_timeout_s = head_timeout_s
        self.idle: dict[Connection, None] = {}
        self.full = Seldom(clock)
        self._no_descriptor = Seldom(clock)

    def make_room(self) -> bool:
        """Close the connection that is idle for the longest; False where every one has a request."""
        oldest = next(iter(self.idle), None)
        self.full.warn(f"{self.most} connections are open; {'a new one was refused' if oldest is None else 'an idle one was closed'}")
        if oldest is not None:
            oldest.give_up()
        return oldest is not None

    def loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler: accepting without a free descriptor is one line, not a traceback each time."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_MORE and "socket" in context:
            self._no_descriptor.warn(f"no connection can be accepted: {error.strerror}")
        else:
            loop.default_exception_handler(context)


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for every head and with a gate in front."""

    def __init__(self, *args: Any, gate: Gate, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate = gate
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._gate.most and not self._gate.make_room():
            self.transport = transport
            transport.write(_FULL)
            transport.close()
            return
        super().connection_made(transport)
        self._gate.idle[self] = None
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused
            return
        super().data_received(data)
        self._look()
        if self in self._gate.idle:
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close without a word: nothing was asked."""
        self._settle()
        self.transport.abort()

    def _look(self) -> None:
        """Is there a request now? Then no head is awaited."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or self.transport.is_closing():
            self._settle()
        else:
            self._gate.idle.setdefault(self)

    def _settle(self) -> None:
        self._gate.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_head(self) -> None:
        """From the first byte on; what follows does not put the deadline off. Between requests uvicorn's keep-alive counts."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._gate.head_timeout_s, self.give_up)
