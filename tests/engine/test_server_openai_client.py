"""The official client against the real API process, with a scripted scheduler on the real wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.engine.api_process import Api, api_process

CLOCK: Any = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
HERMES = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
USER: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0, timeout=10) as client:
        yield client


def test_a_chat_answer_has_text_usage_and_fingerprint(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("Hello there.")
    answer = client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=50)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello there.", "stop")
    sent = api.scheduler.requests[-1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(sent.input_ids)
    assert answer.usage.completion_tokens == len(api.scheduler.tokenizer.encode("Hello there.")) + 1  # the stop token too
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.system_fingerprint == f"lb-{api.settings.digest[:12]}-01234567"
    assert answer.id == f"chatcmpl-{sent.rid}"
    assert api.scheduler.tokenizer.decode(sent.input_ids, skip_special=False).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_gives_role_text_finish_and_usage_in_order(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("Grüße, 世界! 🎉", each=2)
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße, 世界! 🎉"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_max_tokens_ends_with_length(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("a b c d e f")
    answer = client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_sampling_parameters_reach_the_scheduler(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("x")
    client.chat.completions.create(
        model="tiny", messages=USER, temperature=0.5, top_p=0.9, seed=7, max_tokens=9, presence_penalty=0.1, frequency_penalty=0.2,
        logit_bias={"5": -3}, user="u",
        extra_body={"top_k": 4, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True},
    )  # fmt: skip
    s = api.scheduler.requests[-1].sampling
    assert (s.temperature, s.top_p, s.seed, s.max_tokens, s.presence_penalty, s.frequency_penalty) == (0.5, 0.9, 7, 9, 0.1, 0.2)
    assert (s.logit_bias, s.top_k, s.min_p, s.repetition_penalty, s.min_tokens) == ({5: -3.0}, 4, 0.05, 1.1, 2)
    assert (s.stop_token_ids, s.ignore_eos) == ((9,), True)


def test_without_max_tokens_the_answer_may_fill_the_context(api: Api, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=USER)
    sent = api.scheduler.requests[-1]
    assert sent.sampling.max_tokens == 1024 - len(sent.input_ids)


def test_n_answers_have_seeds_in_a_row_and_their_own_ids(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = lambda request: api.scheduler.says(f"seed {request.sampling.seed}")(request)
    before = len(api.scheduler.requests)
    answer = client.chat.completions.create(model="tiny", messages=USER, n=3, seed=41)
    assert [choice.message.content for choice in answer.choices] == ["seed 41", "seed 42", "seed 43"]
    sent = api.scheduler.requests[before:]
    assert len({request.rid for request in sent}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(sent[0].input_ids)


def test_n_streams_carry_their_index(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = lambda request: api.scheduler.says(f"seed {request.sampling.seed}")(request)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="tiny", messages=USER, n=2, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "seed 5", 1: "seed 6"}


def test_requests_without_a_seed_draw_different_ones(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("x")
    for _ in range(2):
        client.chat.completions.create(model="tiny", messages=USER)
    first, second = api.scheduler.requests[-2:]
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("each", [1, 3, 100])
def test_a_stop_string_ends_the_answer_and_the_generation(api: Api, client: openai.OpenAI, stream: bool, each: int) -> None:
    api.scheduler.script = api.scheduler.says("one two three four", each=each)
    aborted = len(api.scheduler.aborted)
    if stream:
        chunks = list(client.chat.completions.create(model="tiny", messages=USER, stop=["xx", "o th"], stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(model="tiny", messages=USER, stop=["xx", "o th"])
        text, finish = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert answer.usage is not None
        through_stop = len(api.scheduler.tokenizer.encode("one two th"))
        assert abs(answer.usage.completion_tokens - through_stop) <= 1
    assert (text, finish) == ("one tw", "stop")
    if each < 100:
        rid = api.scheduler.requests[-1].rid
        api.scheduler.wait_for(lambda: rid in api.scheduler.aborted[aborted:], "the abort")


def test_logprobs_name_each_token_of_the_content(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("Hé")
    answer = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == "Hé"
    assert {entry.logprob for entry in logprobs.content} == {-0.5}
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    assert api.scheduler.requests[-1].logprobs == 2


def test_streamed_logprobs_are_the_same_as_whole_ones(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("Grüße 🎉 done")
    whole = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, stop=["zz"])
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(model="tiny", messages=USER, logprobs=True, stop=["zz"], stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert streamed == [entry.token for entry in logprobs.content or []]


def test_structured_output_parses(api: Api, client: openai.OpenAI) -> None:
    class Point(pydantic.BaseModel):
        x: int
        y: int

    api.scheduler.script = api.scheduler.says('{"x": 1, "y": 2}')
    answer = client.chat.completions.parse(model="tiny", messages=USER, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=1, y=2)
    grammar = api.scheduler.requests[-1].grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert list(json.loads(grammar.text)["properties"]) == ["x", "y"]


def test_a_call_the_model_makes_of_its_own_accord_is_parsed(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("Let me see. " + HERMES)
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[CLOCK])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {"zone": "UTC"})
    assert (message.content or "").strip() == "Let me see."
    sent = api.scheduler.requests[-1]
    assert sent.grammar is None
    assert "clock" in api.scheduler.tokenizer.decode(sent.input_ids)
    again: Any = [*USER, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    api.scheduler.script = api.scheduler.says("It is noon.")
    assert client.chat.completions.create(model="tiny", messages=again, tools=[CLOCK]).choices[0].message.content == "It is noon."


@pytest.mark.parametrize(
    ("said", "choice"),
    [(HERMES, "auto"), ('{"name": "clock", "arguments": {"zone": "UTC"}}', "required"),
     ('{"name": "clock", "arguments": {"zone": "UTC"}}', {"type": "function", "function": {"name": "clock"}})],
)  # fmt: skip
def test_a_streamed_call_comes_in_pieces_that_add_up(api: Api, client: openai.OpenAI, said: str, choice: Any) -> None:
    api.scheduler.script = api.scheduler.says(said)
    names, arguments, finish = [], "", None
    for chunk in client.chat.completions.create(model="tiny", messages=USER, tools=[CLOCK], tool_choice=choice, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
        assert not chunk.choices[0].delta.content
        finish = chunk.choices[0].finish_reason or finish
    assert (names, json.loads(arguments), finish) == (["clock"], {"zone": "UTC"}, "tool_calls")
    assert (api.scheduler.requests[-1].grammar is None) == (choice == "auto")


def test_tool_choice_none_hides_the_tools_and_drops_calls(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("Fine. " + HERMES)
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[CLOCK], tool_choice="none")
    assert "clock" not in api.scheduler.tokenizer.decode(api.scheduler.requests[-1].input_ids)
    assert answer.choices[0].message.tool_calls is None
    assert "tool_call" not in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_one_ends_the_answer(api: Api, client: openai.OpenAI, stream: bool) -> None:
    api.scheduler.script = api.scheduler.hangs_after(HERMES + "\n" + HERMES)
    if stream:
        chunks = list(client.chat.completions.create(model="tiny", messages=USER, tools=[CLOCK], parallel_tool_calls=False, stream=True))
        indexes = {call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []}
        assert (indexes, chunks[-1].choices[0].finish_reason) == ({0}, "tool_calls")
    else:
        answer = client.chat.completions.create(model="tiny", messages=USER, tools=[CLOCK], parallel_tool_calls=False)
        assert len(answer.choices[0].message.tool_calls or []) == 1
    rid = api.scheduler.requests[-1].rid
    api.scheduler.wait_for(lambda: rid in api.scheduler.aborted, "the abort")


def test_a_broken_call_is_no_call_and_says_so(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says('<tool_call>\n{"name": "clock", "arguments": {"zone": \n</tool_call>')
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[CLOCK])
    message: Any = answer.choices[0].message
    assert message.tool_calls is None
    assert message.parse_failures
    assert answer.choices[0].finish_reason == "stop"


def test_a_completion_of_each_form_of_prompt(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says(" world")
    encode = api.scheduler.tokenizer.encode
    forms: list[tuple[Any, list[list[int]]]] = [
        ("Hi", [encode("Hi")]), (["Hi", "Ho"], [encode("Hi"), encode("Ho")]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])
    ]  # fmt: skip
    for prompt, expected in forms:
        before = len(api.scheduler.requests)
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=20)
        assert [choice.text for choice in answer.choices] == [" world"] * len(expected)
        assert [request.input_ids for request in api.scheduler.requests[before:]] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_a_completion_stream(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says(" world")
    chunks = list(client.completions.create(model="tiny", prompt="Hi", stream=True, echo=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hi world"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_echo_with_logprobs_scores_the_prompt(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("zz")
    answer = client.completions.create(model="tiny", prompt="the end", echo=True, logprobs=2, max_tokens=0)
    choice = answer.choices[0]
    ids = api.scheduler.tokenizer.encode("the end")
    assert (choice.text, choice.finish_reason) == ("the end", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None] + [-0.5] * (len(ids) - 1)
    assert "".join(choice.logprobs.tokens or []) == "the end"
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    offsets = choice.logprobs.text_offset or []
    assert [choice.text[offset] for offset in offsets] == [token[0] for token in choice.logprobs.tokens or []]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert api.scheduler.requests[-1].sampling.max_tokens == 1


def test_echo_with_logprobs_and_an_answer_shows_both(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("zz")
    choice = client.completions.create(model="tiny", prompt="the end", echo=True, logprobs=0, max_tokens=9).choices[0]
    assert choice.text == "the endzz"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == "the endzz"
    assert choice.logprobs.top_logprobs is None


def test_models_lists_the_one_that_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "lastbatch"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_what_the_scheduler_refuses_is_an_http_error_even_for_a_stream(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.refuses(400, "the schema does not compile: no such type")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="does not compile"):
            client.chat.completions.create(model="tiny", messages=USER, response_format={"type": "json_object"}, stream=stream)  # type: ignore[call-overload]


def test_an_error_in_mid_stream_reaches_the_client(api: Api, client: openai.OpenAI) -> None:
    def script(request: Any) -> Iterator[Any]:
        yield api.scheduler.tokens(request, api.scheduler.tokenizer.encode("so far"))
        failed = api.scheduler.tokens(request, [], finish="error")
        failed.error = "the batch failed"
        yield failed

    api.scheduler.script = script
    text = ""
    with pytest.raises(openai.APIError, match="the batch failed"):
        for chunk in client.chat.completions.create(model="tiny", messages=USER, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "so far"
    with pytest.raises(openai.InternalServerError, match="the batch failed"):
        client.chat.completions.create(model="tiny", messages=USER)


@pytest.mark.parametrize(("finish", "status", "code"), [("error", 500, "generation_failed"), ("abort", 503, "aborted")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_fails_before_its_first_token_is_an_http_error(
    api: Api, finish: str, status: int, code: str, stream: bool
) -> None:
    api.scheduler.script = lambda request: [api.scheduler.tokens(request, [], finish=finish)]
    api.refused(api.chat(stream=stream), status, code)


def test_tokenize_gives_the_ids_of_a_prompt_and_of_messages(api: Api) -> None:
    answer = api.client.post("/tokenize", json={"prompt": "Hi there"}).json()
    assert answer == {
        "tokens": api.scheduler.tokenizer.encode("Hi there", add_special=True),
        "count": answer["count"],
        "max_model_len": 1024,
    }
    chat = api.client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    api.chat("Hi")
    assert chat["tokens"] == api.scheduler.requests[-1].input_ids


def test_server_info_says_what_runs(api: Api) -> None:
    info = api.client.get("/server_info").json()
    assert info["config"] == json.loads(api.settings.declared_json())
    assert (info["config_digest"], info["invocation_id"]) == (api.settings.digest, "0123456789abcdef0123456789abcdef")
    assert info["ranks"][0]["config_digest"] == api.settings.digest  # from the rank's own black box
    assert set(info["ranks"][0]) == {"rank", "dp", "pp", "tp", "ep", "node", "pid", "config_digest"}
    assert info["paths"] == {"loop": "scripted"}


def test_template_variables_reach_the_template(api: Api, client: openai.OpenAI) -> None:
    api.scheduler.script = api.scheduler.says("x")
    client.chat.completions.create(model="tiny", messages=USER, extra_body={"chat_template_kwargs": {"add_generation_prompt": False}})
    assert not api.scheduler.tokenizer.decode(api.scheduler.requests[-1].input_ids).endswith("assistant\n")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_from_the_answer(tmp_path: Path, stream: bool) -> None:
    with api_process(tmp_path, "--reasoning-parser", "think") as api:
        api.scheduler.script = api.scheduler.says("<think>It is noon here.</think>Noon.")
        if stream:
            deltas = [
                json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                for line in api.chat(stream=True).text.splitlines()
                if line.startswith("data: {")
            ]
            content = "".join(delta.get("content") or "" for delta in deltas)
            reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        else:
            message = api.chat().json()["choices"][0]["message"]
            content, reasoning = message["content"], message["reasoning_content"]
        assert (content, reasoning) == ("Noon.", "It is noon here.")


def test_an_answer_that_follows_a_grammar_is_content_even_where_the_prompt_opens_reasoning(tmp_path: Path) -> None:
    template = tmp_path / "opens.jinja"
    template.write_text("{{ messages[0].content }}\n<think>\n")
    with api_process(tmp_path, "--reasoning-parser", "think", "--chat-template", str(template)) as api:
        api.scheduler.script = api.scheduler.says("It is noon here.</think>Noon.")
        message = api.chat().json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Noon.", "It is noon here.")
        api.scheduler.script = api.scheduler.says('{"a": 1}')
        message = api.chat(response_format={"type": "json_object"}).json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ('{"a": 1}', None)
