"""Server-sent events: OpenAI's chunks on the wire, and the end of the work when nobody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.server.errors import ClientGone

DONE = b"data: [DONE]\n\n"
WRITE_TIMEOUT_S = 60.0
_T = TypeVar("_T")


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client closes the connection. The body must have been read.

    Raises:
        ClientGone: it did.
    """
    return await _race(request.receive, work)


class EventStream(Response):
    """Streams ``events``. ``ended`` is called last, whatever happens: read to the end, client gone or too slow, and
    also when not even the first event was asked for. ``write_timeout_s``: how long a client may leave its socket full."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ended: Callable[[], None], *, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._ended = ended
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(receive, self._pump(send))
        except ClientGone:
            return
        finally:
            self._ended()
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await self._write(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await self._write(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


async def _race(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
