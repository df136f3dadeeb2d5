"""The checking client against the real API process, one that enforces grammars and one that was launched with none."""

from __future__ import annotations

import asyncio
import http.server
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from engine import client
from engine.client import FALLBACKS, INVALID, AsyncClient, BadSchema, Client, InvalidAnswer, NoConnection, StatusError
from tests.engine.api_process import Api, api_process

USER = [{"role": "user", "content": "a secret prompt"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
GOOD = '{"n": 1}'


@pytest.fixture(scope="module")
def enforcing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("enforcing")) as api:
        yield api


@pytest.fixture(scope="module")
def none(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("none"), "--grammar-backend", "none") as api:
        yield api


@pytest.fixture(autouse=True)
def fresh() -> None:
    client.forget()


def _sync(url: str, call: str, *args: Any, how: dict[str, Any], **more: Any) -> Any:
    with Client(url, model="tiny", **how) as one:
        return getattr(one, call)(USER, *args, **more)


def _async(url: str, call: str, *args: Any, how: dict[str, Any], **more: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, model="tiny", **how) as one:
            return await getattr(one, call)(USER, *args, **more)

    return asyncio.run(run())


@pytest.fixture(params=[_sync, _async], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``call(url, method, ..., how=...)`` with either client."""

    def do(url: str, method: str, *args: Any, how: dict[str, Any] | None = None, **more: Any) -> Any:
        return request.param(url, method, *args, how=how or {"timeout_s": 20.0}, **more)

    return do


def lines(api: Api) -> list[str]:
    return [line for line in api.log_path.read_text().splitlines() if " req rid=" in line]


def test_a_value_comes_back_from_a_server_that_enforces_it(enforcing: Api, call: Callable[..., Any]) -> None:
    enforcing.scheduler.script = enforcing.scheduler.says(GOOD)
    assert call(enforcing.url, "json", SCHEMA) == {"n": 1}
    answer = call(f"{enforcing.url}/v1", "ask", SCHEMA)
    assert answer.constrained and answer.served_by == enforcing.url and answer.system_fingerprint.startswith("lb-")
    assert enforcing.scheduler.requests[-1].grammar is not None


def test_the_one_400_is_asked_again_without_response_format_once_and_is_remembered(none: Api, call: Callable[..., Any]) -> None:
    none.scheduler.script = none.scheduler.says(GOOD)
    before = len(lines(none))
    first, second = call(none.url, "ask", SCHEMA), call(none.url, "ask", SCHEMA)
    assert (first.value, first.constrained) == ({"n": 1}, False) == (second.value, second.constrained)
    assert ["status=400" in line for line in lines(none)[before:]] == [True, False, False]
    none.scheduler.script = none.scheduler.says("prose")  # nobody enforces it now, so the client must
    with pytest.raises(InvalidAnswer) as caught:
        call(none.url, "json", SCHEMA)
    assert caught.value.reason == "not_json"


def test_any_other_400_is_raised_as_the_official_client_has_it_and_asked_once(enforcing: Api, call: Callable[..., Any]) -> None:
    before = len(lines(enforcing))
    with pytest.raises(StatusError) as caught:
        call(enforcing.url, "json", SCHEMA, top_p=0)
    assert len(lines(enforcing)) == before + 1
    with (
        openai.OpenAI(base_url=f"{enforcing.url}/v1", api_key="any", max_retries=0) as official,
        pytest.raises(openai.BadRequestError) as its,
    ):
        official.chat.completions.create(model="tiny", messages=USER, top_p=0)  # type: ignore[arg-type]
    ours = caught.value
    assert (ours.status, ours.code, ours.param, ours.kind) == (its.value.status_code, its.value.code, its.value.param or "", its.value.type)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("Sure! " + GOOD, "not_json"),
        (f"```json\n{GOOD}\n```", "not_json"),
        (GOOD + GOOD, "not_json"),
        ('{"n": NaN}', "not_json"),
        ('{"n": 1, "n": 2}', "not_json"),
        ('{"n": "1"}', "schema"),
        ('{"n": 1, "m": 2}', "schema"),
    ],
)
def test_an_answer_that_does_not_fit_is_an_exception_and_is_not_mended(none: Api, text: str, reason: str) -> None:
    none.scheduler.script = none.scheduler.says(text, each=50)
    counted = INVALID.labels(reason)._value.get()
    with pytest.raises(InvalidAnswer) as caught:
        _sync(none.url, "json", SCHEMA, how={})
    assert caught.value.reason == reason
    assert text.strip() == caught.value.text.strip() and (not text or text not in str(caught.value))
    assert INVALID.labels(reason)._value.get() == counted + 1


def test_a_value_that_was_cut_off_is_not_taken_even_if_it_happens_to_parse(none: Api) -> None:
    none.scheduler.script = none.scheduler.says('{"n": 1}    ')
    with pytest.raises(InvalidAnswer) as caught:
        _sync(none.url, "json", SCHEMA, how={}, max_tokens=8)
    assert caught.value.reason == "truncated"


def test_no_other_host_is_asked_unless_one_is_named_and_then_it_is_counted_and_said(
    enforcing: Api, call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    enforcing.scheduler.script = enforcing.scheduler.says(GOOD)
    dead = "http://127.0.0.1:9"
    with pytest.raises(NoConnection, match=r"127\.0\.0\.1:9"):
        call(dead, "json", SCHEMA)
    counted = FALLBACKS.labels("no_connection")._value.get()
    with caplog.at_level(logging.INFO):
        answer = call(dead, "ask", SCHEMA, how={"fallback_base_url": enforcing.url})
    assert answer.served_by == enforcing.url
    assert FALLBACKS.labels("no_connection")._value.get() == counted + 1
    assert any("asking the fallback" in record.message for record in caplog.records)
    assert "secret" not in caplog.text and GOOD not in caplog.text
    with pytest.raises(StatusError):  # a refusal is an answer
        call(enforcing.url, "json", SCHEMA, how={"fallback_base_url": dead}, top_p=0)


def test_a_redirect_to_another_host_is_not_followed(enforcing: Api, call: Callable[..., Any]) -> None:
    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(307)
            self.send_header("Location", f"{enforcing.url}/v1/chat/completions")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Redirect) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with pytest.raises(StatusError, match="307"):
                call(f"http://127.0.0.1:{server.server_port}", "json", SCHEMA)
        finally:
            server.shutdown()
            thread.join()


def test_text_is_any_answer_that_is_not_empty(enforcing: Api, call: Callable[..., Any]) -> None:
    enforcing.scheduler.script = enforcing.scheduler.says("Hello there.")
    assert call(enforcing.url, "text").text == "Hello there."


@pytest.mark.parametrize("schema", [{"type": "no such type"}, "words", {"$ref": "http://127.0.0.1:9/schema.json"}])
def test_a_schema_that_cannot_be_used_is_refused_and_nothing_is_fetched(enforcing: Api, schema: Any) -> None:
    enforcing.scheduler.script = enforcing.scheduler.says(GOOD)
    with Client(enforcing.url, model="tiny") as one, pytest.raises(BadSchema):
        one.json(USER, schema)


def test_there_is_no_default_host_and_what_the_client_gives_itself_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="no default host"):
        Client("", model="m")
    with Client("http://127.0.0.1:9", model="m") as one, pytest.raises(TypeError, match="response_format"):
        one.json(USER, SCHEMA, response_format={"type": "text"})


def test_the_client_loads_neither_torch_nor_the_server() -> None:
    code = "import sys, engine.client; print([m for m in sys.modules if m.split('.')[0] == 'torch' or m.startswith('engine.server')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
