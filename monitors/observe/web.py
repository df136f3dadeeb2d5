"""One HTTP request under one deadline for all of it: a name that nobody resolves, a TLS handshake that never ends and a
server that sends a byte now and then keep nobody waiting."""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

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
        connection.sock = _connected(parts.hostname, connection.port, until, parts.scheme)
        timer = threading.Timer(max(0.0, until - time.monotonic()), _cut, (connection.sock, late))
        timer.daemon = True
        timer.start()
        try:
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
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
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of the connection, under what TLS another thread is at


def _connected(host: str, port: int, until: float, scheme: str) -> socket.socket:
    """A connection to one of a name's addresses; for https with TLS on it whose handshake is still to be made. Raises
    TimeoutError and OSError."""
    refused: OSError = OSError(f"{host}: no address")
    for family, kind, proto, _, address in _addresses(host, port, until):
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(_left(until))
            sock.connect(address)
            sock.settimeout(_left(until))
            if scheme == "https":
                context = ssl.create_default_context()
                context.set_alpn_protocols(["http/1.1"])
                return context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            return sock
        except OSError as error:
            sock.close()
            refused = error
    raise refused


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


_Addresses = list[tuple[Any, Any, int, str, Any]]
_asked: dict[tuple[str, int], list[queue.SimpleQueue[_Addresses | OSError]]] = {}
_asked_lock = threading.Lock()


def _addresses(host: str, port: int, until: float) -> _Addresses:
    """The system's resolver knows no deadline, so it is asked in a thread, which is left alone when it is late. Whoever asks for
    the same name meanwhile waits for the same answer: a resolver that is gone costs one thread a name. Raises TimeoutError, OSError.
    """
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)  # asks nobody
    answer: queue.SimpleQueue[_Addresses | OSError] = queue.SimpleQueue()
    with _asked_lock:
        under_way = (host, port) in _asked
        _asked.setdefault((host, port), []).append(answer)
    if not under_way:
        threading.Thread(target=_look_up, args=(host, port), name=f"resolve {host}", daemon=True).start()
    try:
        found = answer.get(timeout=_left(until))
    except queue.Empty:
        raise TimeoutError(f"{host}: its address was not found in time") from None
    if isinstance(found, OSError):
        raise found
    return found


def _look_up(host: str, port: int) -> None:
    found: _Addresses | OSError
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        found = error
    except UnicodeError as error:  # no host can be called so
        found = OSError(f"{host}: {error}")
    with _asked_lock:
        waiting = _asked.pop((host, port))
    for answer in waiting:
        answer.put(found)
