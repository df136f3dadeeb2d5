"""A forced tool call reads the same however its text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.forced_call import ForcedCallParser
from engine.text.events import Event, ParseFailure, ToolCall, ToolCallStart, collect

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", "}", "]{", '\\"}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def parse(pieces: list[str]) -> list[Event]:
    parser = ForcedCallParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


@settings(deadline=None)
@given(
    st.text(max_size=6),
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    st.sampled_from([None, 1]),
    st.integers(1, 7),
    st.booleans(),
)
def test_every_cut_gives_the_call(name: str, arguments: dict[str, object], indent: int | None, size: int, ascii_only: bool) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=ascii_only)
    answer = collect(parse([text[at : at + size] for at in range(0, len(text), size)]))
    assert answer.failures == []
    ((call),) = answer.calls
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_a_call_begins_together_with_its_arguments() -> None:
    parser = ForcedCallParser()
    assert parser.feed('{"name": "f", "arguments": ') == []
    assert [type(event).__name__ for event in parser.feed("{")] == ["ToolCallStart", "ToolCallArguments"]


def test_what_follows_the_arguments_is_not_theirs() -> None:
    assert collect(parse(['{"name":"f","arguments":{"a":[1]}', "}", " \n"])).calls == [ToolCall("f", '{"a":[1]}')]


@pytest.mark.parametrize(("text", "index"), [("", None), ('{"name": "f', None), ('{"name":"f","arguments":{"a":"}', 0)])
def test_a_call_that_was_cut_short_is_a_failure(text: str, index: int | None) -> None:
    events = parse([text])
    assert isinstance(events[-1], ParseFailure)
    assert events[-1].index == index
    assert collect(events).calls == []


def test_an_escaped_name_is_read_as_json() -> None:
    events = parse([r'{"name": "a\"b", "arguments": {}}'])
    assert events[0] == ToolCallStart(0, 'a"b')
