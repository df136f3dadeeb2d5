"""The canonical form of a grammar, and the key under which its compiled form is kept."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from engine.messages import Grammar

ORDERED_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Maps from names of the schema's author: their order is kept, since that of ``properties`` is the order of the answer."""
LITERALS = frozenset({"const", "enum", "default", "examples"})
"""Values that stand for themselves: an object among them is written as it is given."""
_JSON_KINDS = ("json_schema", "structural_tag")


def canonical(grammar: Grammar) -> Grammar:
    """The same grammar without what has no meaning: JSON white space, and the order of keys where it says nothing.

    A text that is not JSON stays as it is; compiling it will say what is wrong.
    """
    if grammar.kind not in _JSON_KINDS:
        return grammar
    try:
        text = json.dumps(_sorted(json.loads(grammar.text)), separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return grammar
    return msgspec.structs.replace(grammar, text=text)


def grammar_key(grammar: Grammar) -> str:
    """Equal for grammars that mean the same, as far as their form shows it."""
    form = canonical(grammar)
    return f"{form.kind}:{hashlib.sha256(form.text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _sorted(node: Any) -> Any:
    if isinstance(node, list):
        return [_sorted(item) for item in node]
    if not isinstance(node, dict):
        return node
    made: dict[str, Any] = {}
    for name in sorted(node):
        value = node[name]
        if name in LITERALS:
            made[name] = value
        elif name in ORDERED_MAPS and isinstance(value, dict):
            made[name] = {key: _sorted(inner) for key, inner in value.items()}
        else:
            made[name] = _sorted(value)
    return made
