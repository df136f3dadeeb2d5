"""200 requests at once, of every kind, against a pool that holds a few of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Served, serving, wait_for
from tests.tiny_models import tiny_model

REQUESTS = 200
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


def body(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(6)
    asked: dict[str, Any] = {"prompt": "tell me " * rng.randrange(1, 12), "max_tokens": rng.randrange(1, 140), "ignore_eos": True,
                             "temperature": rng.choice([0, 0.8]), "seed": rng.randrange(99)}  # fmt: skip
    if kind == 0:
        asked["prompt"] = "a long story " * rng.randrange(10, 30)
    elif kind == 1:
        asked.update(
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, ignore_eos=False, max_tokens=60
        )
    elif kind == 2:
        asked.update(regex="(ab|cd){1,8}", ignore_eos=False)
    elif kind == 3:
        asked["n"] = 2
    elif kind == 4:
        asked["stop"] = ["e", "zz"]
    if rng.random() < 0.05:
        asked["prompt"] = "far too long " * 400
    asked["stream"] = rng.random() < 0.5
    return asked


async def send(client: httpx.AsyncClient, asked: dict[str, Any], rng: random.Random) -> str:
    """How a request ended, in a word."""
    leave = rng.random() < 0.25
    try:
        async with asyncio.timeout(rng.random() * 2 if leave else 120):
            if not asked["stream"]:
                answer = await client.post("/v1/completions", json=asked)
                if answer.status_code == 200:
                    choices = answer.json()["choices"]
                    assert len(choices) == asked.get("n", 1)
                    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
                    if "response_format" in asked and choices[0]["finish_reason"] == "stop":
                        assert json.loads(choices[0]["text"])["n"] in (1, 2, 3)
                return str(answer.status_code)
            async with client.stream("POST", "/v1/completions", json=asked) as stream:
                lines = [line async for line in stream.aiter_lines() if line]
                if stream.status_code == 200:
                    assert lines[-1] == "data: [DONE]", lines[-3:]
                return str(stream.status_code)
    except TimeoutError:
        assert leave, "no answer in 120 s"
        return "left"


@pytest.mark.parametrize("loop", [("--enable-overlap-schedule",), ()], ids=["overlap", "sequential"])
def test_all_are_answered_or_cleanly_refused_and_no_page_is_lost(model: Path, tmp_path: Path, loop: tuple[str, ...]) -> None:
    args = ("--max-total-tokens", "640", "--max-running-requests", "12", "--chunked-prefill-size", "64", "--context-length", "512",
            "--max-queued-requests", "150", "--speculative-algorithm", "NGRAM", *loop)  # fmt: skip
    with serving(model, tmp_path, *args) as served:
        ends = asyncio.run(storm(served))
        assert set(ends) <= {"200", "400", "503", "left"}, ends
        assert ends["200"] > REQUESTS / 3, ends

        def at_rest() -> dict[str, int] | None:
            host = served.box(0).host
            return host.counters if not host.held and not host.counters["pages_pending"] else None

        counters = wait_for(at_rest, 20, "a server at rest")
        assert counters["pages_free"] + counters["pages_cached"] == counters["pages_total"]
        assert counters["retractions"] > 0, "the pool was never full: the test shows nothing"
        served.complete()
        assert served.stop() == 0


async def storm(served: Served) -> Counter[str]:
    rng = random.Random(11)
    limits = httpx.Limits(max_connections=REQUESTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=served.url, timeout=130, limits=limits) as client:
        return Counter(await asyncio.gather(*(send(client, body(rng), random.Random(n)) for n in range(REQUESTS))))
