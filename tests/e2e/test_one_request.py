"""No single request, and no stranger's packet, may take the server down: each of these once did."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from engine.flags import parse
from engine.launch.relay import Hub
from tests.e2e.serving import Served, serving, wait_for
from tests.ports import free_port
from tests.tiny_models import tiny_model

NOTHING = r"[^\s\S]"  # a class of characters with nothing in it
KILLERS: dict[str, dict[str, Any]] = {
    "a penalty near zero": {"repetition_penalty": 1e-45},
    "a regex that matches nothing": {"regex": NOTHING},
    "a regex with a dead end": {"regex": f"ab{NOTHING}"},
    "a grammar without an end": {"ebnf": 'root ::= root "a" | root "b"'},
    "a pattern that matches nothing": {"guided_json": {"type": "string", "pattern": f"^{NOTHING}$"}},
    "a tag that matches nothing": {"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": NOTHING}}},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(tiny_model(folder / "model"), folder, "--speculative-algorithm", "NGRAM") as one:
        yield one


@pytest.mark.parametrize("body", KILLERS.values(), ids=KILLERS)
def test_a_request_that_cannot_be_answered_fails_alone(served: Served, body: dict[str, Any]) -> None:
    neighbour: list[int] = []

    def beside() -> None:
        with served.client as client:
            asked = {"prompt": "n", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
            try:
                neighbour.append(client.post("/v1/completions", json=asked).status_code)
            except httpx.HTTPError:
                neighbour.append(0)

    thread = threading.Thread(target=beside)
    thread.start()
    wait_for(lambda: served.box(0).host.running > 0 or neighbour, 20, "the neighbour to run")
    with served.client as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 8, **body})
    thread.join(60)
    assert answer.status_code in (400, 500), answer.text
    assert answer.json()["error"]["message"]
    assert served.process.poll() is None
    assert neighbour == [200]


FORGED = msgspec.msgpack.encode({"type": "Report", "node": 7, "mono_ns": 1, "boxes": {}, "ending": True, "start": "x"})


@pytest.mark.parametrize("parts", [[b"garbage"], [b"a", b"b"], [msgspec.msgpack.encode({"type": "Report"})], [FORGED]])
def test_a_stranger_cannot_end_the_group(tmp_path: Path, parts: list[bytes]) -> None:
    port = free_port(4)
    hub = Hub(parse(["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}"]), tmp_path, "start")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{port + 3}")
    try:
        stranger.send_multipart(parts)
        wait_for(lambda: hub._socket.poll(50), 10, "the packet to arrive")
        assert hub.turn() is None
        assert not list(tmp_path.glob("remote-rank-*"))
    finally:
        stranger.close(0)
        hub.close()
        context.term()
