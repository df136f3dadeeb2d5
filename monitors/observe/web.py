"""One HTTP request under one deadline for all of it: a server that sends a byte now and then keeps nobody waiting."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping

MOST_BYTES = 16 << 20
_MOST_REDIRECTS = 3
_KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def ask(url: str, *, deadline_s: float, headers: Mapping[str, str] | None = None, body: bytes | None = None,
        most: int = MOST_BYTES) -> tuple[int, bytes]:  # fmt: skip
    """Status and body (its first ``most`` bytes) of a GET, or of a POST where there is a body. A GET follows redirects on
    the same host (``/metrics`` to ``/metrics/``); others are answers. No proxy of the environment is used.

    Raises:
        TimeoutError: not done by the deadline.
        OSError: no connection, or what came is no HTTP answer.
        ValueError: no URL.
    """
    until = time.monotonic() + deadline_s
    for _ in range(_MOST_REDIRECTS):
        status, found, location = _once(url, until, headers or {}, body, most)
        other = urllib.parse.urljoin(url, location)
        if body is not None or not 300 < status < 400 or not location or _host(other) != _host(url):
            break
        url = other
    return status, found


def _host(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _once(url: str, until: float, headers: Mapping[str, str], body: bytes | None, most: int) -> tuple[int, bytes, str]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in _KINDS or not parts.hostname:
        raise ValueError(f"{url}: no http:// or https:// address")
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection = _KINDS[parts.scheme](parts.hostname, parts.port, timeout=left)
    late = threading.Event()
    try:
        connection.connect()
        timer = threading.Timer(max(0.0, until - time.monotonic()), _cut, (connection.sock, late))
        timer.daemon = True
        timer.start()
        try:
            path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
            connection.request("GET" if body is None else "POST", path, body, {"Connection": "close", **headers})
            answer = connection.getresponse()
            found = answer.read(most)
        finally:
            timer.cancel()
        if late.is_set():  # a body without a length ends where the connection does
            raise TimeoutError
        return answer.status, found, answer.getheader("Location", "")
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError("timed out") from None
        if isinstance(error, http.client.HTTPException):
            raise OSError(f"no HTTP answer: {type(error).__name__}") from error
        raise
    finally:
        connection.close()


def _cut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
