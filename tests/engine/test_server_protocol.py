"""Bodies of requests: what is taken, and how what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.server.errors import ApiError
from engine.server.protocol import ChatRequest, CompletionRequest, decode

USER = [{"role": "user", "content": "Hi"}]


def refusal(body: bytes, kind: type = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(body, kind)
    assert caught.value.status == 400
    return caught.value


def chat(**parameters: Any) -> bytes:
    return json.dumps({"messages": USER, **parameters}).encode()


def test_null_is_the_same_as_absent() -> None:
    request = decode(chat(temperature=None, tools=None, stop=None, stream=None), ChatRequest)
    assert request == decode(chat(), ChatRequest)


def test_what_the_sdk_sends_back_of_an_answer_is_taken() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    earlier = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
               "tool_calls": [call], "reasoning_content": "so"}  # fmt: skip
    body = chat(messages=[*USER, earlier, {"role": "tool", "tool_call_id": "call_1", "content": "42"}])
    assert [message.role for message in decode(body, ChatRequest).messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("parameters", "param", "code"),
    [
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
        ({"stream_options": {"chunk": 1}}, "stream_options.chunk", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour", "unknown_parameter"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_value"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"top_p": -0.1}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_value"),
    ],
)
def test_a_wrong_parameter_is_named(parameters: dict[str, Any], param: str, code: str) -> None:
    error = refusal(chat(**parameters))
    assert (error.param, error.code) == (param, code)
    assert param in error.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"3", b"null", b'{"messages": [}', b"\xff\xfe", b"[" * 100_000, b'{"response_format":' + b'{"a":' * 100_000]
)
def test_what_is_no_json_object_is_said_to_be_none(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


def test_a_missing_parameter_is_named() -> None:
    error = refusal(b"{}", CompletionRequest)
    assert (error.param, error.code) == ("prompt", "missing_parameter")
