"""A deadline for the whole of an HTTP request. httpx's time-outs are for each read: a server that sends a byte now and then
would be waited for without end, before its headers too. And a bound on what is read: an answer without end is none."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

_MOST_BYTES = 16 << 20  # of one answer


class _Bounded(httpx.BaseTransport):
    """Gives up an answer of more than ``_MOST_BYTES``, and one that is packed: what that comes to has no bound."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        found = self._inner.handle_request(request)
        packed = found.headers.get("Content-Encoding", "identity")
        if packed != "identity":
            found.close()
            raise httpx.DecodingError(f"the answer is packed ({packed}), which nobody asked for")
        assert isinstance(found.stream, httpx.SyncByteStream)
        return httpx.Response(found.status_code, headers=found.headers, stream=_Counted(found.stream), extensions=found.extensions)

    def close(self) -> None:
        self._inner.close()


class _Counted(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[bytes]:
        left = _MOST_BYTES
        for part in self._inner:
            left -= len(part)
            if left < 0:
                raise httpx.ReadError(f"an answer of more than {_MOST_BYTES} bytes")
            yield part

    def close(self) -> None:
        self._inner.close()


def client(base_url: str, headers: Mapping[str, str]) -> httpx.Client:
    """One whose requests can be cut: it keeps no connection alive, uses no proxy of the environment, and no answer has no end."""
    own = {"Accept-Encoding": "identity", **headers}
    return httpx.Client(base_url=base_url, headers=own, trust_env=False, transport=_Bounded())


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
