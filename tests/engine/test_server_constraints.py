"""From what a request asks of its answer's form to one grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.messages import Grammar
from engine.server.constraints import call_schema, forced_tools, grammar_of, shape_of
from engine.server.errors import ApiError
from engine.server.protocol import ChatRequest, CompletionRequest, decode

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def chat(**parameters: Any) -> ChatRequest:
    return decode(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **parameters}).encode(), ChatRequest)


def refusal(**parameters: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        grammar_of(chat(**parameters))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"regex": "é" * 2**18 + "x"}, "regex"),
        ({"ebnf": "x" * 2**19 + "x"}, "ebnf"),
        ({"guided_json": {"const": "x" * 2**19}}, "guided_json"),
        ({"guided_choice": ["x" * 2**18, "y" * 2**18]}, "guided_choice"),
        ({"structural_tag": {"triggers": ["x" * 2**19]}}, "structural_tag"),
        ({"structured_outputs": {"grammar": "x" * 2**19 + "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 2**19}}}}, "response_format"),
        ({"tools": [{"function": {"name": "f", "parameters": {"const": "x" * 2**19}}}], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_grammar_of_more_than_512_kib_is_refused(parameters: dict[str, Any], param: str) -> None:
    error = refusal(**parameters)
    assert (error.param, error.code) == (param, "grammar_too_large")
    assert "524288" in error.message


def test_a_grammar_of_512_kib_is_taken() -> None:
    found = grammar_of(chat(regex="x" * 2**19))
    assert found is not None
    assert len(found.text) == 2**19


@pytest.mark.parametrize(
    ("parameters", "kind", "text", "shape"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema", SCHEMA, "json"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": []}}, "structural_tag",
         {"type": "structural_tag", "triggers": ["<f"], "structures": []}, "grammar"),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+", "grammar"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"', "grammar"),
        ({"structural_tag": '{"type":"structural_tag"}'}, "structural_tag", '{"type":"structural_tag"}', "grammar"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "json"),
        ({"guided_regex": "a"}, "regex", "a", "grammar"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"', "grammar"),
        ({"guided_choice": ["yes", 'a "b"\n\\']}, "ebnf", 'root ::= "yes" | "a \\"b\\"\\n\\\\"', "grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "json"),
        ({"structured_outputs": {"choice": ["a"]}}, "ebnf", 'root ::= "a"', "grammar"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "grammar"),
    ],
)  # fmt: skip
def test_every_name_gives_its_grammar(parameters: dict[str, Any], kind: str, text: Any, shape: str) -> None:
    request = chat(**parameters)
    grammar = grammar_of(request)
    assert isinstance(grammar, Grammar)
    assert grammar.kind == kind
    assert (json.loads(grammar.text) if isinstance(text, dict) else grammar.text) == text
    assert shape_of(request) == shape


def test_the_order_of_properties_is_kept() -> None:
    grammar = grammar_of(chat(guided_json=SCHEMA))
    assert grammar is not None
    assert list(json.loads(grammar.text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    "parameters", [{}, {"response_format": {"type": "text"}}, {"tools": [CLOCK]}, {"tools": [CLOCK], "tool_choice": "none"}]
)
def test_without_a_constraint_there_is_no_grammar(parameters: dict[str, Any]) -> None:
    assert grammar_of(chat(**parameters)) is None


def test_plain_completions_take_a_response_format_too() -> None:
    body = json.dumps({"prompt": "Hi", "response_format": {"type": "json_object"}}).encode()
    assert grammar_of(decode(body, CompletionRequest)) == Grammar("json_object")


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format.extra"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "frob": 1}}}, "response_format.json_schema.frob"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "tools": [CLOCK], "tool_choice": "required"}, "tool_choice"),
        ({"regex": " "}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    assert refusal(**parameters).param == param


def test_a_named_function_forces_a_call_of_it_alone() -> None:
    request = chat(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}})
    assert [tool.function.name for tool in forced_tools(request)] == ["clock"]
    grammar = grammar_of(request)
    assert grammar is not None
    assert json.loads(grammar.text) == {
        "type": "object",
        "properties": {"name": {"const": "clock"}, "arguments": {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def test_required_forces_a_call_of_any() -> None:
    grammar = grammar_of(chat(tools=[WEATHER, CLOCK], tool_choice="required"))
    assert grammar is not None
    names = [call["properties"]["name"]["const"] for call in json.loads(grammar.text)["anyOf"]]
    assert names == ["weather", "clock"]


def test_references_inside_a_tools_parameters_still_point_into_them() -> None:
    import jsonschema

    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}, "required": ["v"]}
        },
    }
    tool = {"type": "function", "function": {"name": "grow", "parameters": tree}}
    schema = call_schema(forced_tools(chat(tools=[CLOCK, tool], tool_choice="required")))
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"name": "grow", "arguments": {"root": {"v": 1, "next": {"v": 2}}}})
    assert not validator.is_valid({"name": "grow", "arguments": {"root": {"v": 1, "next": {"v": "2"}}}})


@pytest.mark.parametrize("depth", [10, 300, 900, 3000])
def test_a_deeply_nested_schema_is_taken_or_refused_but_never_breaks(depth: int) -> None:
    parameters = '{"a":' * depth + "{}" + "}" * depth
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}'
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}],"tool_choice":"required"}}'
    try:
        assert grammar_of(decode(body.encode(), ChatRequest)) is not None
        assert depth < 3000
    except ApiError as error:
        assert error.status == 400
        assert depth > 10
