"""A deadline for the whole of an HTTP request. httpx's time-outs are for each read: a server that sends a byte now and then
would be waited for without end, before its headers too."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx


def client(base_url: str, headers: Mapping[str, str]) -> httpx.Client:
    """One whose requests can be cut: it keeps no connection alive, and uses no proxy of the environment."""
    return httpx.Client(base_url=base_url, headers=dict(headers), trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Cut:
    """Cuts one request's connection when ``seconds`` are over. Give its ``extensions`` to a request of ``client``: the
    deadline begins with the connection."""

    def __init__(self, seconds: float) -> None:
        self.late = False
        self._timer: threading.Timer | None = None
        self._seconds = seconds
        self.extensions: dict[str, Any] = {"trace": self._trace}

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._timer = threading.Timer(self._seconds, self._end, (info["return_value"].get_extra_info("socket"),))
            self._timer.daemon = True
            self._timer.start()

    def _end(self, sock: socket.socket) -> None:
        self.late = True
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[Cut]:
    """Raises httpx.ReadTimeout in the place of what the cut leads to."""
    cut = Cut(seconds)
    try:
        yield cut
        if cut.late:  # an answer without a length ends where the connection does
            raise httpx.ReadTimeout(f"not done in {seconds:g} s")
    except httpx.HTTPError as error:
        if cut.late:
            raise httpx.ReadTimeout(f"not done in {seconds:g} s") from error
        raise
    finally:
        cut.close()
