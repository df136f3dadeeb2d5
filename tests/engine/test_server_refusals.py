"""What is refused, with which status, word and parameter, and that the scheduler never hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.server.errors import GRAMMAR_OFF
from engine.server.protocol import WITHOUT_EFFECT
from tests.engine.api_process import Api, api_process
from tests.engine.scripted_scheduler import ready

CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("api"), "--max-running-requests", "2", "--max-queued-requests", "2") as api:
        yield api


@pytest.fixture(scope="module")
def without_grammar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("plain"), "--grammar-backend", "none", "--tool-call-parser", "none") as api:
        yield api


@pytest.fixture(autouse=True)
def _normal_script(api: Api) -> None:
    api.scheduler.script = api.scheduler.says("Hello.")


@pytest.mark.parametrize(
    ("parameters", "status", "code", "param"),
    [
        ({"frobnicate": 1}, 400, "unknown_parameter", "frobnicate"),
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"top_p": 0}, 400, "invalid_value", "top_p"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, 400, "invalid_value", "min_tokens"),
        ({"max_completion_tokens": 1024}, 400, "context_length_exceeded", "max_completion_tokens"),
        ({"stop": ""}, 400, "invalid_value", "stop"),
        ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
        ({"stop_token_ids": [512]}, 400, "invalid_value", "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"٣": 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"²": 1}}, 400, "invalid_value", "logit_bias"),
        ({"top_k": 2**70}, 400, "invalid_value", "top_k"),
        ({"top_k": 2**31}, 400, "invalid_value", "top_k"),
        ({"stop_token_ids": [5] * 1025}, 400, "invalid_value", "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, 400, "invalid_value", "stop_token_ids[0]"),
        ({"repetition_penalty": 1e-45}, 400, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": 1e30}, 400, "invalid_value", "repetition_penalty"),
        ({"regex": "a" * (2**19 + 1)}, 400, "grammar_too_large", "regex"),
        ({"messages": [{"role": "user"}] * 1025}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "missing_parameter", "messages[0].content"),
        ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
        ({"modalities": ["text", "audio"]}, 400, "invalid_value", "modalities[1]"),
        ({"verbosity": "loud"}, 400, "invalid_value", "verbosity"),
        ({"audio": {"voice": "x"}}, 400, "unknown_parameter", "audio"),
        ({"functions": []}, 400, "unknown_parameter", "functions"),
        ({"n": 5}, 400, "invalid_value", "n"),
        ({"regex": "a", "ignore_eos": True}, 400, "invalid_value", "ignore_eos"),
        ({"chat_template_kwargs": {"messages": 1, "tools": 2}}, 400, "invalid_value", "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "invalid_value",
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_a_chat_request_is_refused(api: Api, parameters: dict[str, Any], status: int, code: str, param: str) -> None:
    before = len(api.scheduler.requests)
    message = api.refused(api.chat(**parameters), status, code, param)
    assert len(message) > 10
    assert len(api.scheduler.requests) == before


def test_what_cannot_change_the_text_is_taken_and_changes_nothing(api: Api) -> None:
    harmless: dict[str, Any] = {
        "metadata": {"team": "a"}, "modalities": ["text"], "parallel_tool_calls": True, "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "service_tier": "auto", "store": True,
        "user": "u", "verbosity": "low",
    }  # fmt: skip
    assert harmless.keys() == dict(WITHOUT_EFFECT).keys()
    for parameters in ({}, harmless, {"reasoning_effort": "low"}):
        assert api.chat(seed=1, **parameters).status_code == 200
    plain, *others = [(asked.input_ids, asked.sampling, asked.grammar) for asked in api.scheduler.requests[-3:]]
    assert others == [plain, plain]


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        ({"prompt": ""}, "empty_prompt", None),
        ({"prompt": []}, "empty_prompt", "prompt"),
        ({"prompt": [[]]}, "empty_prompt", None),
        ({"prompt": ["a", 1]}, "invalid_value", "prompt"),
        ({"prompt": [True]}, "invalid_value", "prompt"),
        ({"prompt": [512]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"suffix": "x"}, "invalid_value", "suffix"),
        ({"n": 1, "best_of": 2}, "invalid_value", "best_of"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "invalid_value", "echo"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"messages": []}, "unknown_parameter", "messages"),
    ],
)
def test_a_completion_request_is_refused(api: Api, parameters: dict[str, Any], code: str, param: str | None) -> None:
    before = len(api.scheduler.requests)
    api.refused(api.complete(**{"prompt": "Hi", **parameters}), 400, code, param)
    assert len(api.scheduler.requests) == before


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(api: Api) -> None:
    message = api.refused(api.complete([5] * 1024), 400, "context_length_exceeded")
    assert "1024 tokens" in message
    message = api.refused(api.complete([5] * 1000, max_tokens=25), 400, "context_length_exceeded", "max_tokens")
    assert all(number in message for number in ("1000", "25", "1025", "1024"))
    assert api.complete([5] * 1000, max_tokens=24).status_code == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(api: Api) -> None:
    longest = max(len(api.scheduler.tokenizer.token_bytes(token)) for token in range(512))
    over, fits = "x" * (1024 * longest + 1), "x" * (1024 * longest)
    turn = {"role": "user", "content": "Hi"}
    before = len(api.scheduler.requests)
    for answer, param in (
        (api.complete(over), "prompt"),
        (api.complete(["Hi", over]), "prompt"),
        (api.chat(over), "messages"),
        (api.chat(messages=[turn, {**turn, "name": over}]), "messages"),
        (api.chat(messages=[turn, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": over}}]}]), "messages"),
        (api.chat(tools=[{"type": "function", "function": {"name": "f", "description": over}}]), "messages"),
        (api.client.post("/tokenize", json={"prompt": over}), "prompt"),
        (api.client.post("/tokenize", json={"messages": [{**turn, "content": over}]}), "messages"),
    ):
        message = api.refused(answer, 400, "context_length_exceeded", param)
        assert "characters" in message
        assert str(1024 * longest) in message
    assert len(api.scheduler.requests) == before
    assert api.client.post("/tokenize", json={"prompt": fits}).json()["count"] > 1024


def test_a_list_of_ids_is_refused_by_its_length_before_its_items_are_looked_at(api: Api) -> None:
    few, many = [5] * 1000 + ["x"], [5] * 1024 + ["x"]
    for short, long in ((few, many), ([few], [many])):
        api.refused(api.complete(short), 400, "invalid_value", "prompt")
        assert "1025 tokens" in api.refused(api.complete(long), 400, "context_length_exceeded")
    api.refused(api.complete(["a", "b", "c", "d", 1]), 400, "invalid_value", "n")


def test_arguments_of_an_earlier_call_that_are_nested_too_deeply_are_refused(api: Api) -> None:
    call = {"function": {"name": "f", "arguments": "[" * 1500}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    api.refused(api.chat(messages=messages), 400, "invalid_value", "messages")
    api.refused(api.client.post("/tokenize", json={"messages": messages}), 400, "invalid_value", "messages")


def test_a_request_that_the_pool_could_never_hold_is_refused(api: Api) -> None:
    api.scheduler.send(ready(pool=64))
    try:
        api.scheduler.wait_for(lambda: api.client.get("/server_info").json()["pool_tokens"] == 64, "the small pool")
        assert "KV pool holds 64" in api.refused(api.complete([5] * 64), 400, "context_length_exceeded")
    finally:
        api.scheduler.send(ready())
        api.scheduler.wait_for(lambda: api.client.get("/server_info").json()["pool_tokens"] == 4096, "the usual pool")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"messages": [' + b"[" * 5000])
def test_what_is_no_json_object_is_refused(api: Api, body: bytes) -> None:
    for route in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        answer = api.client.post(route, content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_beyond_the_limit_is_refused(api: Api) -> None:
    most = 4 * 2**20 + 64 * 1024
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        api.refused(api.client.post(route, content=b"x" * (most + 1)), 413, "body_too_large")
        api.refused(api.client.post(route, content=b"x" * most), 400, "invalid_json")


def test_messages_that_the_template_cannot_render_are_refused_with_its_reason(tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with api_process(tmp_path, "--chat-template", str(template)) as strict:
        assert "roles must alternate" in strict.refused(strict.chat(), 400, "chat_template", "messages")


def test_a_full_queue_answers_503_and_when_to_come_back(api: Api) -> None:
    api.scheduler.script = api.scheduler.hangs_after("x")
    before = len(api.scheduler.requests)
    with api.client.stream("POST", "/v1/completions", json={"prompt": ["a", "b", "c", "d"], "stream": True}) as stream:
        api.scheduler.wait_for(lambda: len(api.scheduler.requests) == before + 4, "four requests in flight")
        answer = api.complete("e")
        api.refused(answer, 503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        stream.close()
    api.scheduler.wait_for(lambda: len(set(api.scheduler.aborted)) >= 4, "the aborts")
    api.scheduler.script = api.scheduler.says("Hello.")
    assert api.complete("e").status_code == 200


@pytest.mark.parametrize(
    "method,path,status",
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405), ("POST", "/v1/completions/", 404)],
)
def test_a_wrong_route_or_method_has_the_same_shape(api: Api, method: str, path: str, status: int) -> None:
    answer = api.client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
        {"regex": "[a-z]+"},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": {"structures": [], "triggers": []}},
        {"guided_json": {"type": "object"}},
        {"guided_choice": ["a", "b"]},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [CLOCK], "tool_choice": "required"},
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_without_a_grammar_backend_every_grammar_gets_sglangs_words(without_grammar: Api, parameters: dict[str, Any], stream: bool) -> None:
    before = len(without_grammar.scheduler.requests)
    answer = without_grammar.chat(stream=stream, **parameters)
    assert without_grammar.refused(answer, 400, "grammar_disabled") == GRAMMAR_OFF
    assert len(without_grammar.scheduler.requests) == before


def test_without_a_grammar_backend_free_text_goes_on(without_grammar: Api) -> None:
    assert without_grammar.chat(response_format={"type": "text"}).status_code == 200
    answer = without_grammar.complete(response_format={"type": "json_object"})
    assert without_grammar.refused(answer, 400, "grammar_disabled") == GRAMMAR_OFF


def test_tools_without_a_parser_for_them_are_refused(without_grammar: Api) -> None:
    message = without_grammar.refused(without_grammar.chat(tools=[CLOCK]), 400, "invalid_value", "tool_choice")
    assert "--tool-call-parser none" in message
    assert without_grammar.chat(tools=[CLOCK], tool_choice="none").status_code == 200
