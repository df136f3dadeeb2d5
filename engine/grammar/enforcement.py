"""What a JSON schema asks for that the compiled grammar would not hold.

The compiler accepts these silently and leaves them out, so an answer could break its schema. They are refused at
admission, each with its place in the schema. Not refused, because the answer stays close to what was meant: ``oneOf``
holds as ``anyOf``; an unknown ``format``, ``content*`` and ``nullable`` are notes; objects with ``properties`` take
no others unless ``additionalProperties`` says so; properties come in the order of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from engine.grammar.keys import LITERALS

MAX_DEPTH = 64
_NEVER = {
    "uniqueItems": "uniqueItems",
    "not": "not",
    "if": "if/then/else",
    "dependentRequired": "dependentRequired",
    "dependentSchemas": "dependentSchemas",
    "dependencies": "dependencies",
    "contains": "contains",
    "$dynamicRef": "$dynamicRef",
    "$recursiveRef": "$recursiveRef",
}
_BY_TYPE = {
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"},
}
_CONSTRAINTS = frozenset().union(*_BY_TYPE.values())
_TYPE_IS_SEEN = frozenset({"properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems", "unevaluatedItems"})
_WINS = ("$ref", "allOf", "anyOf", "oneOf")
_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LENGTH = frozenset({"minLength", "maxLength"})
_PIECES = re.compile(
    r"""(?P<control>\\(?:[nrtfv0]|c[A-Za-z]|x[01][0-9a-fA-F]|u00[01][0-9a-fA-F])|[\x00-\x1f])
    |(?P<quote>"|\\\\|\\"|\\x22|\\x5[cC]|\\u0022|\\u005[cC])|(?P<open>\[\^?)|(?P<close>\])|\\.""",
    re.DOTALL | re.VERBOSE,
)
"""What a pattern may hold that matches a character which JSON writes as an escape; other escapes are read as one piece."""
_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:<?[=!])")


def unenforced(schema: Any) -> list[str]:
    """Reasons, one for each thing that would be dropped, such as ``$.properties.a: uniqueItems cannot be enforced``."""
    return [f"{path}: {reason}" for path, reason in _walk(schema, "$", 0)]


def _walk(node: Any, path: str, depth: int, *, names_only: bool = False) -> Iterator[tuple[str, str]]:
    """``names_only``: a schema of property names, which are strings without saying so."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _walk(item, f"{path}[{index}]", depth + 1)
        return
    if not isinstance(node, dict):
        return
    if depth > MAX_DEPTH:
        yield path, f"more than {MAX_DEPTH} levels"
        return
    yield from ((path, reason) for reason in _reasons({"type": "string", **node} if names_only else node))
    for name, value in node.items():
        if name in LITERALS:
            continue
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            for key, inner in value.items():
                yield from _walk(inner, f"{path}.{name}.{key}", depth + 1)
        else:
            yield from _walk(value, f"{path}.{name}", depth + 1, names_only=name == "propertyNames")


def _reasons(node: dict[str, Any]) -> Iterator[str]:
    names = set(node)
    for name, called in _NEVER.items():
        if name in names and node[name] is not False:
            yield f"{called} cannot be enforced"
    for name in ("pattern", "format"):
        if name in names and names & _LENGTH:
            yield f"{name} together with {_list(names & _LENGTH)}: the length would be ignored; put it into the pattern"
    if isinstance(node.get("pattern"), str) and has_lookaround(node["pattern"]):
        yield "look-around in a pattern cannot be enforced"
    if isinstance(node.get("pattern"), str) and _matches_escaped(node["pattern"]):
        yield "a pattern cannot ask for quotes, backslashes or control characters: it is held against the answer as written"
    if "multipleOf" in names and (names & _RANGE or node.get("type") != "integer"):
        yield "multipleOf holds only for type integer without a range"
    reference = node.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield f"$ref to {reference}: only references into the schema itself (#/...) can be followed"
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        yield "allOf with several schemas cannot be enforced; merge them"
    winner = next((name for name in _WINS if name in names), None)
    if winner is not None:
        lost = (names & _CONSTRAINTS) | {name for name in _WINS if name in names and name != winner}
        if lost:
            yield f"{_list(lost)} beside {winner} would be ignored; move it inside"
    elif not names & {"type", "enum", "const", *_TYPE_IS_SEEN}:
        for kind, belonging in _BY_TYPE.items():
            if names & belonging:
                yield f'{_list(names & belonging)} without a type would be ignored; add "type": "{kind}"'


def has_lookaround(pattern: str) -> bool:
    return _LOOKAROUND.search(pattern) is not None


def _matches_escaped(pattern: str) -> bool:
    """Whether a pattern asks for a quote, a backslash or a control character.

    The compiler would have the answer hold it as it is, which is not JSON. From character classes it takes quotes and
    backslashes out by itself, and from negated ones control characters too.
    """
    opened = ""
    for piece in _PIECES.finditer(pattern):
        if opened:
            if piece["close"]:
                opened = ""
            elif piece["control"] and opened == "[":
                return True
        elif piece["open"]:
            opened = piece["open"]
        elif piece["control"] or piece["quote"]:
            return True
    return False


def _list(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names))
