"""Reasoning and tool-call parsers: what they say, and that no cut of the text changes it."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.text.events import (
    Content,
    Event,
    ParseFailure,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
    merge,
)
from engine.text.reasoning import ThinkParser, opens_reasoning
from engine.text.stream_parser import StreamParser, reasoning_parser, tool_parser
from engine.text.toolcalls import CLOSE, OPEN, HermesParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}], "c": "</tool_call> 2>&1 \\" <tool_call>"}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
FRAGMENTS = [
    "<think>", "</think>", OPEN, CLOSE, "<", "</", "<tool", "_call>", " ", "\n", "text", '{"name": "f", "arguments": {"a": 1}}', CALL,
    '{"name": "f",', '"arguments": ', "{", "}", '"', "\\", ",", ":", "[", "]", "1", "null", '"name"', '{"arguments": {}, "name": "g"}', "é",
]  # fmt: skip


def both(text: list[str], *, starts_inside: bool = False) -> list[Event]:
    parser = StreamParser(reasoning=ThinkParser(starts_inside), tools=HermesParser())
    events = [event for piece in text for event in parser.feed(piece)]
    return merge([*events, *parser.finish()])


def hermes(*pieces: str, forbidden: bool = False) -> list[Event]:
    parser = HermesParser(forbidden)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge([*events, *parser.finish()])


def think(*pieces: str, starts_inside: bool = False) -> list[Event]:
    parser = ThinkParser(starts_inside)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge([*events, *parser.finish()])


markup = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@given(markup, st.booleans())
@example(f"<think>why {OPEN}\n</think>\n\nSo: {CALL}\n{BROKEN}\n{CALL} end", False)
@settings(max_examples=300, deadline=None)
def test_every_two_way_split_and_every_chunk_size_give_what_one_shot_gives(text: str, starts_inside: bool) -> None:
    whole = both([text], starts_inside=starts_inside)
    for cut in range(len(text)):
        assert both([text[:cut], text[cut:]], starts_inside=starts_inside) == whole
    for size in range(1, min(len(text), 16)):
        assert both([text[at : at + size] for at in range(0, len(text), size)], starts_inside=starts_inside) == whole


@given(markup)
@settings(max_examples=300, deadline=None)
def test_whatever_the_markup_a_call_that_reads_as_json_is_one_that_did_not_fail(text: str) -> None:
    events = both([text])
    failed = {event.index for event in events if isinstance(event, ParseFailure)}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    started = [event.index for event in events if isinstance(event, ToolCallStart)]
    assert started == list(range(len(started))) == list(arguments)
    for index, raw in arguments.items():
        if index in failed:
            with pytest.raises(ValueError):
                json.loads(raw)
        else:
            assert isinstance(json.loads(raw), dict)
    said = "".join(event.text if isinstance(event, Content) else "|" for event in events)
    assert OPEN not in said
    assert CLOSE not in said


@given(st.text("<>/tol_cah k\n", max_size=40))
@settings(deadline=None)
def test_text_without_markup_comes_out_as_it_went_in(text: str) -> None:
    if OPEN in text or CLOSE in text or text.lstrip().startswith("<think>"):
        return
    assert collect(both([text])).content == text


def test_a_call_gives_its_name_and_its_arguments_as_they_are_written() -> None:
    answer = collect(hermes(f"I will.\n{CALL}\n"))
    assert answer.content == "I will."
    assert answer.calls == [ToolCall("f", '{"a": [1, {"b": "}"}], "c": "</tool_call> 2>&1 \\" <tool_call>"}')]
    assert answer.failures == []


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "argum') == []
    assert parser.feed('ents": {"text": "on') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"text": "on')]
    assert parser.feed('ce"}') == [ToolCallArguments(0, 'ce"')]
    assert parser.feed("}") == [ToolCallArguments(0, "}")]


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('{"arguments": {"x": 1}, "name": "f"}', '{"x": 1}'),
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"id": 7 , "type": "function", "name": "f", "arguments": {"x": -1.5e3}, "more": [1, {}]}', '{"x": -1.5e3}'),
    ],
)
def test_other_ways_to_write_a_good_call(block: str, arguments: str) -> None:
    answer = collect(hermes(f"{OPEN}{block}{CLOSE}"))
    assert answer.calls == [ToolCall("f", arguments)]
    assert answer.failures == []


def test_several_calls_have_their_own_indices_and_white_space_between_them_is_markup() -> None:
    events = hermes(f"{CALL}\n{CALL}\n\nand so on")
    assert [event for event in events if isinstance(event, ToolCallStart)] == [ToolCallStart(0, "f"), ToolCallStart(1, "f")]
    assert events[-1] == Content("and so on")
    assert [event for event in events if isinstance(event, Content)] == [Content("and so on")]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"name": "f"}', "no arguments"),
        ('{"arguments": {}}', "no name"),
        ('{"name": "", "arguments": {}}', "the name is no text"),
        ('{"name": 3, "arguments": {}}', "the name is no text"),
        ('{"name": "f", "arguments": null}', "arguments are no object"),
        ('{"name": "f", "arguments": "x"}', "not JSON"),
        ('{"name": "f", "arguments": "[]"}', "arguments are no object"),
        ('{"name": "f", "arguments": {"a": oops}}', "outside a string"),
        ('{"name": "f", "arguments": {"a": 01}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "outside a string"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "repeated"),
        ('{"name": "f", "name": "g", "arguments": {}}', "repeated"),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {}}', "given twice"),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', "control character"),
        ('{"name": "f", "arguments": {"a": 1}', "after a value"),
        ('{"name": "f", "arguments": ' + '{"a":' * 70 + "1" + "}" * 71, "levels"),
    ],
)
def test_a_malformed_call_is_a_failure_and_never_content_or_a_call(block: str, reason: str) -> None:
    answer = collect(hermes(f"before {OPEN}{block}{CLOSE} after"))
    assert [failure.reason for failure in answer.failures if reason in failure.reason]
    assert answer.calls == []
    assert answer.content == "before after"


def test_a_call_after_a_malformed_one_is_still_read() -> None:
    answer = collect(hermes(f"{BROKEN}{CALL}"))
    assert [call.name for call in answer.calls] == ["f"]
    assert len(answer.failures) == 1


def test_a_missing_closing_tag_does_not_lose_a_complete_call() -> None:
    good = f'{OPEN}{{"name": "f", "arguments": {{}}}}'
    assert collect(hermes(good)).calls == [ToolCall("f", "{}")]
    answer = collect(hermes(f"{good}{good}"))
    assert len(answer.calls) == 2
    assert answer.failures == []


@pytest.mark.parametrize("tail", ["}", "junk", '{"name": "g", "arguments": {}}'])
def test_text_behind_a_complete_call_is_dropped_and_counted(tail: str) -> None:
    answer = collect(hermes(f'{OPEN}{{"name": "f", "arguments": {{}}}}{tail}{CLOSE}done'))
    assert [call.name for call in answer.calls] == ["f"]
    assert answer.content == "done"
    assert len(answer.failures) == 1


def test_an_answer_that_ends_inside_a_call_fails_it() -> None:
    events = hermes('<tool_call>{"name": "f", "arguments": {"a": {}')
    assert events == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": {}'), ParseFailure("the answer ended inside a tool call", 0)]
    assert collect(events).calls == []


def test_a_second_closing_tag_is_swallowed_and_counted() -> None:
    answer = collect(hermes(f"{CALL}{CLOSE}ok"))
    assert (answer.content, len(answer.calls), len(answer.failures)) == ("ok", 1, 1)


def test_under_tool_choice_none_markup_does_not_leak() -> None:
    answer = collect(hermes(f"a {CALL} b", forbidden=True))
    assert answer.calls == []
    assert answer.failures[0].reason == "a tool call although tool_choice is none"
    assert OPEN not in answer.content


def test_reasoning_and_answer_are_told_apart() -> None:
    assert think("<think>\nhm </b>\n</think>\n\nYes. <think>") == [Reasoning("hm </b>"), Content("Yes. <think>")]
    assert think("hm\n</think>Yes.", starts_inside=True) == [Reasoning("hm"), Content("Yes.")]
    assert think("<think>hm</think>Yes.", starts_inside=True) == [Reasoning("hm"), Content("Yes.")]
    assert think("  plain <think>x</think>") == [Content("  plain <think>x</think>")]
    assert think("<think>\n\n</think>\n\nYes.") == [Content("Yes.")]


def test_an_answer_that_ends_inside_reasoning_is_reasoning() -> None:
    assert think("<think>and then</thi") == [Reasoning("and then</thi")]
    assert think("<thi") == [Content("<thi")]


def test_reasoning_streams_as_it_comes() -> None:
    parser = ThinkParser()
    assert parser.feed("<think>one two") == [Reasoning("one two")]
    assert parser.feed(" </thi") == []
    assert parser.feed("s three") == [Reasoning(" </this three")]


def test_tool_markup_inside_reasoning_is_reasoning() -> None:
    answer = collect(both([f"<think>maybe {CALL}</think>{CALL}"]))
    assert len(answer.calls) == 1
    assert OPEN in answer.reasoning


def test_a_prompt_that_ends_in_the_opener_starts_inside() -> None:
    assert opens_reasoning("<|assistant|>\n<think>\n")
    assert not opens_reasoning("<think></think>\n")


def test_parsers_are_found_by_the_names_of_their_flags() -> None:
    assert reasoning_parser("none") is None
    assert isinstance(reasoning_parser("think"), ThinkParser)
    assert tool_parser("none") is None
    assert isinstance(tool_parser("hermes"), HermesParser)
    with pytest.raises(ValueError, match="--tool-call-parser"):
        tool_parser("other")
    assert StreamParser().feed(OPEN) == [Content(OPEN)]
