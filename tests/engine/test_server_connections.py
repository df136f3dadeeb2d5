"""Connections that say nothing, or not enough, or are too many: on real sockets, and in the real process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

from engine.server.connections import Connection, Gate, Seldom, most_connections
from tests.engine.api_process import api_process

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once; ``/slow`` answers when the client is gone."""
    while scope["path"] == "/slow" and (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Peer:
    """One connection to the server, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, head: bytes = ASK) -> bytes:
        self.writer.write(head)
        return await asyncio.wait_for(self.reader.readuntil(b"ok"), 5)

    async def end(self) -> bytes:
        """What still comes before the server closes; a reset is a close."""
        try:
            return await asyncio.wait_for(self.reader.read(), 5)
        except ConnectionResetError:
            return b""


class Site:
    """A listening server, and who is connected."""

    def __init__(self, port: int, state: ServerState) -> None:
        self.port, self.state = port, state
        self.peers: list[Peer] = []

    async def connect(self, first: bytes = b"") -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        self.peers.append(peer)
        if first:
            peer.writer.write(first)
        return peer

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def site(gate: Gate) -> AsyncIterator[Site]:
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, state, {}, loop, gate=gate), "127.0.0.1", 0)
    made = Site(server.sockets[0].getsockname()[1], state)
    try:
        yield made
    finally:
        server.close()
        for peer in made.peers:
            peer.writer.transport.abort()
        await made.until(lambda: not state.connections and not state.tasks)
        assert not gate.idle


@pytest.mark.parametrize("first", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_is_given_up_by_a_deadline(first: bytes) -> None:
    async def scenario() -> None:
        async with site(Gate(10, head_timeout_s=0.1)) as here:
            assert await (await here.connect(first)).end() == b""

    asyncio.run(scenario())


def test_a_head_that_drips_does_not_put_its_deadline_off() -> None:
    async def scenario() -> None:
        async with site(Gate(10, head_timeout_s=0.2)) as here:
            peer = await here.connect(ASK[:-2])
            ended = asyncio.create_task(peer.end())
            for number in range(1000):
                if ended.done():
                    break
                peer.writer.write(b"x%d: y\r\n" % number)
                await asyncio.sleep(0.01)
            assert await ended == b""

    asyncio.run(scenario())


def test_the_deadline_holds_for_the_second_head_of_a_connection_too() -> None:
    async def scenario() -> None:
        async with site(Gate(10, head_timeout_s=0.2)) as here:
            peer = await here.connect()
            assert (await peer.ask()).startswith(b"HTTP/1.1 200")
            peer.writer.write(b"GET / HT")
            assert await peer.end() == b""

    asyncio.run(scenario())


def test_a_request_may_take_longer_than_its_head() -> None:
    async def scenario() -> None:
        gate = Gate(10, head_timeout_s=0.05)
        async with site(gate) as here:
            await here.connect(ASK.replace(b"/", b"/slow", 1))
            await here.until(lambda: here.state.tasks and not gate.idle)
            silent = await here.connect()
            await silent.end()  # a later connection's deadline has passed
            assert len(here.state.tasks) == 1

    asyncio.run(scenario())


def test_where_no_more_fit_the_longest_idle_one_makes_room() -> None:
    async def scenario() -> None:
        async with site(Gate(3)) as here:
            silent = await here.connect()
            await here.until(lambda: len(here.state.connections) == 1)
            kept = await here.connect()
            assert (await kept.ask()).startswith(b"HTTP/1.1 200")
            busy = await here.connect(ASK.replace(b"/", b"/slow", 1))
            await here.until(lambda: len(here.state.tasks) == 1)
            newcomer = await here.connect()
            assert (await newcomer.ask()).startswith(b"HTTP/1.1 200")
            assert await silent.end() == b""
            assert (await kept.ask()).startswith(b"HTTP/1.1 200")
            assert not busy.reader.at_eof()

    asyncio.run(scenario())


def test_where_all_have_a_request_the_newcomer_is_refused_and_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with site(Gate(2)) as here:
            for _ in range(2):
                await here.connect(ASK.replace(b"/", b"/slow", 1))
            await here.until(lambda: len(here.state.tasks) == 2)
            for _ in range(20):
                refused = await (await here.connect()).end()
                assert refused.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1" in refused
                assert b"too_many_connections" in refused
            assert len(here.state.tasks) == 2

    asyncio.run(scenario())
    assert caplog.text.count("2 connections are open") == 1


def test_a_warning_that_repeats_is_said_every_10_s_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 9.9, 10.0, 30.0))
    seldom = Seldom(lambda: next(times))
    for _ in range(5):
        seldom.warn("full")
    assert caplog.messages == ["full", "full (2 more times since it was last said)", "full"]


def test_other_errors_of_the_loop_are_not_held_back() -> None:
    passed: list[Any] = []

    class Loop(asyncio.SelectorEventLoop):
        def default_exception_handler(self, context: Any) -> None:
            passed.append(context)

    loop = Loop()
    other = {"message": "x", "exception": OSError(errno.EPIPE, "pipe"), "socket": None}
    Gate(1).loop_failed(loop, other)
    Gate(1).loop_failed(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "many"), "socket": None})
    loop.close()
    assert passed == [other]


@pytest.mark.parametrize(
    ("descriptors", "requests", "most"),
    [(1024, 544, 512), (2**20, 544, 8192), (2**20, 10_000, 20_000), (resource.RLIM_INFINITY, 544, 8192), (1, 1, 1)],
)
def test_the_limit_follows_from_the_descriptors(descriptors: int, requests: int, most: int) -> None:
    assert most_connections(descriptors, requests) == most


def test_without_a_free_descriptor_the_log_has_a_line_and_it_recovers(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, contextlib.ExitStack() as stack:
        process = psutil.Process(api.process.pid)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 3, hard))
        url = httpx.URL(api.url)
        for _ in range(20):
            stack.enter_context(socket.create_connection((url.host, url.port or 0), timeout=5))
        api.scheduler.wait_for(lambda: "no connection can be accepted" in api.log(), "the line")
        stack.close()
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        with httpx.Client(base_url=api.url, timeout=10) as fresh:
            assert fresh.get("/health").status_code == 200
        assert api.log().count("no connection can be accepted") == 1
        assert "Traceback" not in api.log()
