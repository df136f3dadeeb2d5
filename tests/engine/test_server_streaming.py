"""Streams and bodies at their edges: what the client does at the worst moment ends the work, always."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from engine.server.errors import ApiError, ClientGone
from engine.server.generation import read_body
from engine.server.streaming import EventStream, unless_gone

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "headers": [], "path": "/"}


async def forever(*_: Any) -> Any:
    await asyncio.Event().wait()


async def left() -> dict[str, Any]:
    return {"type": "http.disconnect"}


class Events:
    """Endless events; ``finished`` says that the generator's own end was reached."""

    def __init__(self) -> None:
        self.begun = self.finished = False
        self.ended = 0

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        self.begun = True
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)
        finally:
            self.finished = True

    def end(self) -> None:
        self.ended += 1


def run(stream: EventStream, receive: Any, send: Any) -> None:
    asyncio.run(asyncio.wait_for(stream(SCOPE, receive, send), 5))  # type: ignore[arg-type]


def test_a_client_that_leaves_before_the_first_event_still_ends_the_work() -> None:
    events = Events()
    run(EventStream(events(), events.end), left, forever)
    assert (events.begun, events.ended) == (False, 1)


def test_a_client_that_leaves_in_the_middle_ends_the_work_and_the_generator() -> None:
    events = Events()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        while len(sent) < 5:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    run(EventStream(events(), events.end), receive, send)
    assert sent[0]["type"] == "http.response.start"
    assert (events.finished, events.ended) == (True, 1)


def test_a_client_that_reads_nothing_is_given_up_by_a_deadline() -> None:
    events = Events()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await forever()

    run(EventStream(events(), events.end, write_timeout_s=0.05), forever, send)
    assert (events.finished, events.ended) == (True, 1)


def test_a_connection_that_breaks_in_a_write_is_a_client_that_left() -> None:
    events = Events()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    run(EventStream(events(), events.end), forever, send)
    assert events.ended == 1


def test_an_error_of_the_work_is_not_swallowed() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"data: x\n\n"
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        pass

    ended: list[int] = []
    with pytest.raises(ZeroDivisionError):
        run(EventStream(broken(), lambda: ended.append(1)), forever, send)
    assert ended == [1]


def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def scenario() -> None:
        with pytest.raises(ClientGone):
            await unless_gone(Request(SCOPE, left), work())

    asyncio.run(asyncio.wait_for(scenario(), 5))
    assert cancelled == [True]


def test_a_result_that_is_there_when_the_client_leaves_is_still_the_result() -> None:
    async def work() -> int:
        return 42

    assert asyncio.run(unless_gone(Request(SCOPE, left), work())) == 42


def test_a_body_that_does_not_come_is_given_up_by_a_deadline() -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(Request(SCOPE, forever), 100, timeout_s=0.05))
    assert caught.value.status == 408


@pytest.mark.parametrize("said", ["101", "9" * 5000])
def test_a_body_that_says_it_is_too_large_is_not_read(said: str) -> None:
    scope = {**SCOPE, "headers": [(b"content-length", said.encode())]}
    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(read_body(Request(scope, forever), 100), 5))
    assert (caught.value.status, "100 bytes" in caught.value.message) == (413, True)


def test_a_body_that_grows_too_large_is_not_read_on() -> None:
    async def endless() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(read_body(Request(SCOPE, endless), 100), 5))
    assert caught.value.status == 413
