"""Classes of answers, and what is said of a class that changes: pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from monitors import engines
from monitors.fleet import Caller
from opsctl.callers import foresee, matrix
from opsctl.callers.agreed import Agreed
from opsctl.callers.answer import classify
from opsctl.callers.request import prompt_sha, shape_of, with_nonce
from opsctl.rollout import reply
from opsctl.rollout.checks import Outcome
from opsctl.rollout.reply import Reply

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
AS_JSON = {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
WITH_TOOL = {"messages": USER, "tools": [TOOL]}


@pytest.mark.parametrize(
    ("given", "request_", "expect", "kind"),
    [
        (Reply(200, "words", "stop"), {"messages": USER}, "text", "text"),
        (Reply(200, '{"n": 1}', "stop"), {"messages": USER}, "text", "text"),
        (Reply(200, '{"n": 1}', "stop"), {"messages": USER}, "json", "json"),
        (Reply(200, '{"n": 1}', "stop"), AS_JSON, "json", "json"),
        (Reply(200, '{"n": "1"}', "stop"), AS_JSON, "json", "json invalid"),
        (Reply(200, '{"n": 1', "length"), AS_JSON, "json", "text"),
        (Reply(200, "[1]", "stop"), {"messages": USER, "response_format": {"type": "json_object"}}, "json", "json invalid"),
        (Reply(200, "", "tool_calls", (("f", '{"n": 1}'),)), WITH_TOOL, "tool_call", "tool_call"),
        (Reply(200, "", "tool_calls", (("f", '{"n": "x"}'),)), WITH_TOOL, "tool_call", "tool_call invalid"),
        (Reply(200, "", "tool_calls", (("g", "{}"),)), WITH_TOOL, "tool_call", "tool_call invalid"),
        (Reply(400, why="no"), AS_JSON, "json", "http 400"),
        (Reply(0, why="refused"), {"messages": USER}, "text", "none"),
        (Reply(200, " ", "stop"), {"messages": USER}, "text", "none"),
        (Reply(200, "!" * 20, "stop"), {"messages": USER}, "text", "degenerate"),
    ],
)
def test_an_answer_is_put_into_a_class(given: Reply, request_: Mapping[str, Any], expect: str, kind: str) -> None:
    assert classify(given, request_, expect).kind == kind


@pytest.mark.parametrize(
    ("more", "shape"),
    [
        ({}, "text"),
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"guided_json": {}}, "json"),
        ({"structured_outputs": {"json": {}}}, "json"),
        ({"structured_outputs": {"regex": "a"}}, "grammar"),
        ({"regex": "a+"}, "grammar"),
        ({"tools": [TOOL]}, "tool"),
        ({"tools": [TOOL], "tool_choice": "required"}, "forced_tool"),
        ({"tools": [TOOL], "tool_choice": "none"}, "text"),
    ],
)
def test_a_request_has_a_shape(more: dict[str, Any], shape: str) -> None:
    assert shape_of({"messages": USER, **more}) == shape


def test_a_nonce_goes_into_the_last_user_message_of_a_copy() -> None:
    parts = {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "x"}]}
    for request in ({"messages": USER}, parts, {"prompt": "hi"}):
        before = json.dumps(request)
        marked = with_nonce(request, "abc")
        assert json.dumps(request) == before
        assert prompt_sha(marked) == prompt_sha({"prompt": "[abc] hi"})


def test_a_stream_is_read_as_what_it_says_and_one_that_breaks_off_is_no_answer() -> None:
    delta = 'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}], "system_fingerprint": "f"}'
    call = 'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}]}'
    end = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'
    good = reply.streamed([delta, "", call, end, "data: [DONE]"])
    assert (good.text, good.finish, good.tool_calls, good.tokens, good.pieces, good.why) == ("a", "stop", (("f", "{}"),), 2, 2, "")
    assert "without [DONE]" in reply.streamed([delta, end]).why
    assert "boom" in reply.streamed(['data: {"error": {"message": "boom"}}']).why
    assert "not a stream" in reply.streamed(["data: nonsense"]).why


def caller(**more: Any) -> Caller:
    return Caller(name="c", request=AS_JSON, expect="json", **more)


@pytest.mark.parametrize(
    ("before", "texts", "agreed", "outcome"),
    [
        ("json", ['{"n": 1}'], "", Outcome.passed),
        ("json", ["prose"] * 3, "", Outcome.failed),
        ("json", ["prose", '{"n": 1}', "prose"], "", Outcome.inconclusive),
        ("json", ["prose"], "text", Outcome.passed),
        ("text", ["prose"], "", Outcome.passed),  # it was so before, so the change has not done it
        ("text", ['{"n": 1}'], "", Outcome.passed),  # as it should be
        ("", ["prose"] * 3, "", Outcome.failed),  # nothing recorded: the fleet file's word counts
    ],
)
def test_a_class_that_changes_fails_unless_it_is_agreed_and_one_that_varies_is_inconclusive(
    before: str, texts: list[str], agreed: str, outcome: Outcome
) -> None:
    answers = iter(texts)
    declared = {"c": Agreed(agreed, "2030-01-01")} if agreed else {}
    (row,) = matrix.compare((caller(),), lambda request: Reply(200, next(answers), "stop"), lambda: "n",
                            before={"c": before} if before else {}, agreed=declared, foreseen={})  # fmt: skip
    assert row.outcome is outcome, row
    assert list(answers) == []
    assert bool(row.must) == (outcome is Outcome.failed or bool(agreed))


@pytest.mark.parametrize(
    ("engine", "before", "after", "same", "will"),
    [
        ("lastbatch", [], ["--page-size", "32"], True, "json"),
        ("lastbatch", [], ["--grammar-backend=none"], False, "http 400"),
        ("sglang", [], ["--grammar-backend", "none"], False, "http 400"),
        ("sglang", ["--grammar-backend", "none"], [], False, ""),
        ("vllm", [], ["--structured-outputs-config", "{}"], False, ""),
        ("vllm", [], ["--max-num-seqs", "4"], True, "json"),
        ("vllm", ["model-a"], ["model-b"], False, ""),
        ("generic", [], ["--anything"], False, ""),
    ],
)
def test_flags_tell_what_a_client_will_see_or_that_it_is_not_known(
    engine: str, before: list[str], after: list[str], same: bool, will: str
) -> None:
    (one,) = foresee.foresee((caller(),), ["x", "serve", *before], ["x", "serve", *after], env_changes=False,
                             dialect=engines.load(engine), known={"c": "json"})  # fmt: skip
    assert (one.same, one.after) == (same, will), one
