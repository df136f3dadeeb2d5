"""The link to the scheduler, alone on real sockets: what comes, what never comes, and what is no message."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from engine.messages import FromScheduler, Generate, Outputs, Refused, Sampling, Tokens, encode
from engine.server.wire import Answer, Link
from tests.engine.scripted_scheduler import ready


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """The scheduler's end, by hand."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, 0)
        self._push.connect(f"ipc://{folder}/from-scheduler.sock")

    def send(self, *messages: FromScheduler | bytes) -> None:
        for message in messages:
            self._push.send(message if isinstance(message, bytes) else encode(message))

    def close(self) -> None:
        self._push.close()
        self._context.term()


@contextlib.asynccontextmanager
async def linked(clock: Clock) -> AsyncIterator[tuple[Link, Peer]]:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        link = Link(Path(folder), silence_s=5, clock=clock)
        peer = Peer(folder)
        reading = asyncio.create_task(link.run())
        try:
            yield link, peer
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            link.close()
            peer.close()


def request(rid: str) -> Generate:
    return Generate(rid=rid, input_ids=[1], sampling=Sampling(seed=0, max_tokens=1))


async def got(answers: asyncio.Queue[Answer]) -> Answer:
    return await asyncio.wait_for(answers.get(), 5)


def test_a_frame_that_is_no_message_is_logged_and_the_next_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with linked(Clock()) as (link, peer):
            answers: asyncio.Queue[Answer] = asyncio.Queue()
            link.submit(request("a"), answers)
            peer.send(b"junk", Outputs([Tokens(rid="nobody", ids=[1]), Tokens(rid="a", ids=[5], finish="length")]))
            assert (await got(answers)).ids == [5]  # type: ignore[union-attr]
            assert link.in_flight == 0

    asyncio.run(scenario())
    assert "frame of 4 bytes" in caplog.text


def test_a_refusal_ends_a_request() -> None:
    async def scenario() -> None:
        async with linked(Clock()) as (link, peer):
            answers: asyncio.Queue[Answer] = asyncio.Queue()
            link.submit(request("a"), answers)
            peer.send(ready(), Outputs([Refused("a", 400, "no")]))
            assert (await got(answers)).message == "no"  # type: ignore[union-attr]
            assert (link.in_flight, link.ready is not None) == (0, True)

    asyncio.run(scenario())


def test_an_id_is_free_again_when_the_scheduler_has_ended_the_aborted_request() -> None:
    async def scenario() -> None:
        async with linked(Clock()) as (link, peer):
            answers: asyncio.Queue[Answer] = asyncio.Queue()
            link.submit(request("a"), answers)
            assert link.unique("a") == "a~2"
            link.abort("a")
            link.abort("a")
            assert (link.unique("a"), link.unique("b")) == ("a~2", "b")
            link.submit(request("b"), answers)
            peer.send(Outputs([Tokens(rid="a", ids=[], finish="abort"), Tokens(rid="b", ids=[1], finish="length")]))
            assert (await got(answers)).rid == "b"  # type: ignore[union-attr]
            assert answers.empty()
            assert link.unique("a") == "a"

    asyncio.run(scenario())


def test_a_call_that_is_not_answered_ends_by_its_deadline() -> None:
    async def scenario() -> None:
        async with linked(Clock()) as (link, _):
            with pytest.raises(TimeoutError):
                await link.set_fault("decode.slow", timeout_s=0.05)
            with pytest.raises(TimeoutError):
                await link.clear_fault("", timeout_s=0.05)

    asyncio.run(scenario())


def test_the_rate_of_tokens_falls_to_nothing_when_nothing_comes() -> None:
    async def scenario() -> None:
        clock = Clock()
        async with linked(clock) as (link, peer):
            answers: asyncio.Queue[Answer] = asyncio.Queue()
            link.submit(request("a"), answers)
            peer.send(Outputs([Tokens(rid="a", ids=[1] * 30, finish="length")]))
            await got(answers)
            assert link.tokens_per_s() == 3.0
            clock.now += 11
            assert link.tokens_per_s() == 0.0

    asyncio.run(scenario())


def test_a_drain_without_an_answer_ends_by_its_deadline() -> None:
    async def scenario() -> None:
        clock = Clock()
        async with linked(clock) as (link, _):
            assert await link.drain(clock.now + 1)  # nothing in flight, and nobody who could drain
            link.submit(request("a"), asyncio.Queue())
            assert not await link.drain(clock.now)

    asyncio.run(scenario())
