"""A request of opsctl's has one deadline, whatever the server does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from opsctl import cut
from opsctl.load.client import Client, NoServer
from opsctl.rollout.probe import Api
from tests.drip import BEGINNINGS, dripping
from tests.ports import free_port


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_server_that_drips_is_given_up_at_the_deadline(beginning: bytes) -> None:
    with dripping(beginning) as url:
        begun = time.monotonic()
        with cut.client(url, {}) as client, pytest.raises(httpx.ReadTimeout, match=r"not done in 0\.3 s"), cut.at_most(0.3) as limit:
            client.get("/health", timeout=60, extensions=limit.extensions)
        api = Api(url)
        try:
            for stream in (False, True):
                assert "not done in 0.3 s" in api.ask({"model": "m", "messages": [], "stream": stream}, 0.3).why
        finally:
            api.close()
        assert time.monotonic() - begun < 10


@contextlib.contextmanager
def endless(head: bytes) -> Iterator[str]:
    """A server that answers with ``head`` and then never ends."""
    with socket.create_server(("127.0.0.1", free_port())) as listening:

        def serve() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                with one, contextlib.suppress(OSError):
                    one.recv(65536)
                    one.sendall(head)
                    while True:
                        one.sendall(b" " * 65536)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_answer_without_end_is_given_up_before_it_fills_the_memory() -> None:
    async def model(url: str) -> None:
        async with Client(url) as client:
            await client.find_model()

    with endless(b"HTTP/1.1 200 OK\r\n\r\n") as url:
        with cut.client(url, {}) as client, pytest.raises(httpx.ReadError, match="more than"), cut.at_most(60) as limit:
            client.get("/health", extensions=limit.extensions)
        with pytest.raises(NoServer, match="without end"):
            asyncio.run(model(url))
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    with endless(packed) as url, cut.client(url, {}) as client, pytest.raises(httpx.DecodingError, match="packed"):
        client.get("/health")
