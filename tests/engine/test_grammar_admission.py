"""Keys of grammars, and what a schema may not ask for: each refused thing is one that the compiler would drop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.grammar.enforcement import unenforced
from engine.grammar.keys import canonical, grammar_key
from engine.messages import Grammar


def key(schema: Any) -> str:
    return grammar_key(Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema)))


def test_keys_are_equal_for_what_means_the_same() -> None:
    assert key('{"type":"object","required":["a"]}') == key('{ "required": ["a"],\n "type": "object" }')
    nested = {"properties": {"a": {"type": "string", "minLength": 1}}}
    assert key(nested) == key('{"properties": {"a": {"minLength": 1, "type": "string"}}}')


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"properties": {"a": {}, "b": {}}}', '{"properties": {"b": {}, "a": {}}}'),
        ('{"items": {"properties": {"a": {}, "b": {}}}}', '{"items": {"properties": {"b": {}, "a": {}}}}'),
        ('{"const": {"a": 1, "b": 2}}', '{"const": {"b": 2, "a": 1}}'),
        ('{"enum": [{"a": 1, "b": 2}]}', '{"enum": [{"b": 2, "a": 1}]}'),
        ('{"const": 1}', '{"const": 1.0}'),
        ('{"properties": {"properties": {"a": {}, "b": {}}}}', '{"properties": {"properties": {"a": {}, "c": {}}}}'),
    ],
)
def test_keys_differ_where_the_answer_would(one: str, other: str) -> None:
    assert key(one) != key(other)


def test_a_property_called_properties_is_a_schema_like_any_other() -> None:
    assert key('{"properties": {"properties": {"type": "string", "minLength": 1}}}') == key(
        '{"properties": {"properties": {"minLength": 1, "type": "string"}}}'
    )


def test_kinds_do_not_share_keys_and_bad_json_has_one() -> None:
    assert grammar_key(Grammar("regex", "a")) != grammar_key(Grammar("ebnf", "a"))
    assert key("{") != key("{{")
    assert canonical(Grammar("json_schema", "{")).text == "{"
    assert key('"\\ud800"') != key('"x"')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "$: uniqueItems"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "$.properties.a: not"),
        ({"type": "object", "if": {}, "then": {}}, "$: if/then/else"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "$: dependentRequired"),
        ({"type": "array", "contains": {"const": 1}}, "$: contains"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "$: pattern together with maxLength"),
        ({"type": "string", "format": "date", "minLength": 3}, "$: format together with minLength"),
        ({"type": "string", "pattern": "(?=a)b"}, "$: look-around"),
        ({"type": "string", "pattern": "(?<!a)b"}, "$: look-around"),
        ({"type": "string", "pattern": 'a"b'}, "$: a pattern cannot ask for quotes"),
        ({"type": "string", "pattern": r"a\\\\"}, "$: a pattern cannot ask for quotes"),
        ({"type": "string", "pattern": r"a\nb"}, "$: a pattern cannot ask for quotes"),
        ({"type": "string", "pattern": r"[a\t]"}, "$: a pattern cannot ask for quotes"),
        ({"type": "number", "multipleOf": 0.1}, "$: multipleOf"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "$: multipleOf"),
        ({"allOf": [{"type": "string"}, {"type": "string"}]}, "$: allOf with several"),
        ({"type": "object", "properties": {}, "allOf": [{}]}, "$: properties beside allOf"),
        ({"$ref": "#/$defs/a", "maxLength": 3}, "$: maxLength beside $ref"),
        ({"anyOf": [{"type": "object"}], "required": ["a"]}, "$: required beside anyOf"),
        ({"anyOf": [{"type": "null"}], "oneOf": [{"type": "null"}]}, "$: oneOf beside anyOf"),
        ({"anyOf": [{"type": "null"}, {"required": ["a"]}]}, "$.anyOf[1]: required without a type"),
        ({"minimum": 3}, '$: minimum without a type would be ignored; add "type": "number"'),
        ({"$ref": "http://example.com/x"}, "$: $ref to http://example.com/x"),
        ({"$ref": "#anchor"}, "$: $ref to #anchor"),
        ({"$defs": {"x": {"items": [{"uniqueItems": True, "type": "array"}]}}}, "$.$defs.x.items[0]: uniqueItems"),
    ],
)
def test_what_would_be_dropped_is_named_with_its_place(schema: dict[str, Any], reason: str) -> None:
    assert [found for found in unenforced(schema) if found.startswith(reason)], unenforced(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "pattern": r"\(?=a"},
        {"type": "string", "pattern": r'[^"\\\\\n]+\d\w\s\[\]["]'},
        {"type": "array", "uniqueItems": False, "items": {"type": "integer", "multipleOf": 5}},
        {"title": "A", "description": "b", "default": {"not": 1}, "anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": [{"uniqueItems": True}]}}},
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}},
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": {"type": "null"}}},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": ["integer", "null"], "minimum": 1},
    ],
)
def test_what_is_enforced_or_harmless_is_taken(schema: Any) -> None:
    assert unenforced(schema) == []


def test_a_schema_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(100):
        schema = {"items": schema}
    assert "levels" in unenforced(schema)[0]
