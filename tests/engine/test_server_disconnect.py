"""A client that leaves: everything it had in flight is aborted, wherever it was."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from engine.messages import Generate, Tokens
from tests.engine.api_process import Api, api_process


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("api")) as api:
        yield api


def send(api: Api, rid: str = "", **body: Any) -> socket.socket:
    """A request whose connection the test can cut."""
    text = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **body})
    at = urlsplit(api.url)
    connection = socket.create_connection((at.hostname, at.port or 80), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n" + (f"X-Request-Id: {rid}\r\n" if rid else "")
    connection.sendall(f"{head}\r\n{text}".encode())
    return connection


def started(api: Api, count: int) -> list[str]:
    api.scheduler.wait_for(lambda: len(api.scheduler.requests) >= count, f"{count} requests")
    return [request.rid for request in api.scheduler.requests]


def tokens_taken(api: Api) -> int:
    """How many tokens have come to answers: each is measured as a first one or as one after another."""
    lines = [line.split() for line in api.client.get("/metrics").text.splitlines()]
    names = ("lastbatch:time_to_first_token_seconds_count", "lastbatch:inter_token_latency_seconds_count")
    return sum(int(float(line[1])) for line in lines if line[0] in names)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["", "some text"])
def test_a_client_that_leaves_has_its_generations_aborted(api: Api, stream: bool, said: str) -> None:
    api.scheduler.script = api.scheduler.hangs_after(said)
    before, taken = len(api.scheduler.requests), tokens_taken(api)
    connection = send(api, stream=stream, n=2)
    rids = started(api, before + 2)[before:]
    if stream and said:
        assert b"text/event-stream" in connection.recv(4096)
    told = len(api.scheduler.tokenizer.encode(said)) * len(rids)
    api.scheduler.wait_for(lambda: tokens_taken(api) == taken + told, "all that is said")
    connection.close()
    api.scheduler.wait_for(lambda: set(rids) <= set(api.scheduler.aborted), "both aborts")
    rid = rids[0].rpartition("-")[0]
    api.scheduler.wait_for(
        lambda: any(f"rid={rid} " in line and f"out={told} finish=disconnect" in line for line in api.log().splitlines()), "the log line"
    )
    api.scheduler.script = api.scheduler.says("Hello.")
    assert api.chat().status_code == 200
    assert "lastbatch:in_flight_requests 0.0" in api.client.get("/metrics").text


def test_the_late_tokens_of_an_aborted_request_do_not_reach_its_retry(api: Api) -> None:
    api.scheduler.script = api.scheduler.hangs_after("")
    before = len(api.scheduler.requests)
    connection = send(api, rid="retried")
    started(api, before + 1)
    connection.close()
    api.scheduler.wait_for(lambda: "retried" in api.scheduler.aborted, "the abort")

    def script(request: Generate) -> Iterator[Tokens]:
        stale = api.scheduler.tokens(request, api.scheduler.tokenizer.encode("stale"))
        stale.rid = "retried"
        yield stale
        yield from api.scheduler.says("fresh")(request)  # type: ignore[misc]

    api.scheduler.script = script
    answer = api.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "retried"})
    assert answer.json()["choices"][0]["text"] == "fresh"
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("retried", "cmpl-retried")


def test_a_client_that_half_sends_a_body_and_leaves_is_forgotten(api: Api) -> None:
    before = len(api.scheduler.requests)
    at = urlsplit(api.url)
    with socket.create_connection((at.hostname, at.port or 80), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    api.scheduler.script = api.scheduler.says("Hello.")
    assert api.complete().status_code == 200
    assert len(api.scheduler.requests) == before + 1
    assert "internal error" not in api.log()


def test_many_clients_of_which_half_leave_at_any_moment_leave_nothing_behind(api: Api) -> None:
    api.scheduler.script = api.scheduler.says("a longer answer that takes a while to come", each=2)
    chance = random.Random(7)
    before, aborted = len(api.scheduler.requests), len(api.scheduler.aborted)

    def one(number: int) -> bool:
        """Whether it read its answer to the end."""
        connection = send(api, stream=number % 2 == 0, n=chance.choice((1, 3)), stop=chance.choice((None, "takes")))
        read, patience = b"", chance.randrange(4000) if number % 4 < 2 else 10**9
        with connection:
            while len(read) < patience and not read.endswith((b"[DONE]\n\n\r\n0\r\n\r\n", b'cached_tokens":1}}}')):
                part = connection.recv(min(patience - len(read), 4096))
                assert part
                read += part
        return len(read) < patience

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        whole = sum(pool.map(one, range(60)))
    assert whole >= 30
    api.scheduler.wait_for(lambda: "lastbatch:in_flight_requests 0.0" in api.client.get("/metrics").text, "nothing in flight")
    ids = [request.rid for request in api.scheduler.requests[before:]]
    assert len(set(ids)) == len(ids) >= 60
    assert set(api.scheduler.aborted[aborted:]) <= set(ids)
    assert "Traceback" not in api.log()
