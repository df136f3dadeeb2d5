"""The form that a request asks of its answer: at most one grammar, from the many names that ask for one.

Pure. ``grammar_of`` answers without looking at the prompt, so that ``--grammar-backend none`` can refuse in
microseconds, before anything is tokenised or sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.messages import Grammar, GrammarKind
from engine.server.errors import bad
from engine.server.protocol import ChatRequest, Common, CompletionRequest, NamedTool, Tool

MOST_GRAMMAR_BYTES = 512 * 2**10
"""A longer text would occupy a compiler until its deadline, and is no grammar that a person or a program means."""


def grammar_of(request: ChatRequest | CompletionRequest) -> Grammar | None:
    """The grammar that the answer must follow, or None.

    Raises:
        ApiError: 400: two constraints at once, a tool choice without its tool, a response format that is unknown
            or incomplete, a grammar of more than 512 KiB.
    """
    try:
        found = _asked(request)
        if isinstance(request, ChatRequest) and (forced := forced_tools(request)):
            found.append(("tool_choice", Grammar("json_schema", _json(call_schema(forced)))))
    except RecursionError:
        raise bad("a schema in the request is nested too deeply") from None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise bad(
            f"{names}: an answer can follow one constraint only; leave the others out", param=found[1][0], code="conflicting_constraints"
        )
    for name, grammar in found:
        if (size := len(grammar.text.encode())) > MOST_GRAMMAR_BYTES:
            raise bad(f"{name}: {size} bytes of {grammar.kind}; at most {MOST_GRAMMAR_BYTES}", param=name, code="grammar_too_large")
    return found[0][1] if found else None


def shape_of(request: ChatRequest | CompletionRequest) -> str:
    """How the access line calls what is asked for: ``text``, ``json``, ``tool`` or ``grammar``."""
    if isinstance(request, ChatRequest) and request.tools and request.tool_choice != "none":
        return "tool"
    form = (request.response_format or {}).get("type", "text")
    outputs = request.structured_outputs
    if form in ("json_object", "json_schema") or request.guided_json is not None or (outputs and (outputs.json or outputs.json_object)):
        return "json"
    others = (
        request.regex,
        request.ebnf,
        request.structural_tag,
        request.guided_regex,
        request.guided_grammar,
        request.guided_choice,
        outputs,
    )
    return "grammar" if form != "text" or any(other is not None for other in others) else "text"


def forced_tools(request: ChatRequest) -> list[Tool]:
    """The tools of which the answer must be a call; empty when the model is free."""
    tools = request.tools or []
    names: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            raise bad(f"tools[{index}].function.name: {name!r} is there twice", param="tools")
        names[name] = tool
    choice = request.tool_choice
    if choice == "required":
        if not tools:
            raise bad("tool_choice: required needs tools", param="tool_choice")
        return tools
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            there = ", ".join(names) or "none"
            raise bad(f"tool_choice: no tool is called {name!r}; there are: {there}", param="tool_choice")
        return [names[name]]
    if choice == "auto" and not tools:
        raise bad("tool_choice: auto needs tools", param="tool_choice")
    return []


def call_schema(tools: list[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of ``tools``: ``{"name": ..., "arguments": {...}}``, as Hermes writes it.

    A parameter schema with references keeps its own root: it moves under ``$defs`` and its references with it.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters: Any = tool.function.parameters or {"type": "object"}
        if _has_reference(parameters):
            key = f"arguments{index}"
            definitions[key] = _rebased(parameters, f"#/$defs/{key}")
            parameters = {"$ref": f"#/$defs/{key}"}
        calls.append({
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _has_reference(node: Any) -> bool:
    if isinstance(node, dict):
        return "$ref" in node or any(_has_reference(value) for value in node.values())
    return isinstance(node, list) and any(_has_reference(value) for value in node)


def _rebased(node: Any, root: str) -> Any:
    if isinstance(node, dict):
        return {
            key: root + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _rebased(value, root)
            for key, value in node.items()
        }
    return [_rebased(value, root) for value in node] if isinstance(node, list) else node


def _asked(request: Common) -> list[tuple[str, Grammar]]:
    found: list[tuple[str, Grammar]] = []
    if request.response_format is not None and (grammar := _response_format(request.response_format)):
        found.append(("response_format", grammar))
    for name, kind, value in (
        ("regex", "regex", request.regex),
        ("ebnf", "ebnf", request.ebnf),
        ("structural_tag", "structural_tag", request.structural_tag),
        ("guided_json", "json_schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_grammar", "ebnf", request.guided_grammar),
    ):
        if value is not None:
            found.append((name, _grammar(name, kind, value)))  # type: ignore[arg-type]
    if request.guided_choice is not None:
        found.append(("guided_choice", _choice("guided_choice", request.guided_choice)))
    if request.structured_outputs is not None:
        found.append(("structured_outputs", _structured(request)))
    return found


def _response_format(form: dict[str, Any]) -> Grammar | None:
    kind = form.get("type")
    allowed = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if kind in allowed and (unknown := sorted(set(form) - allowed[kind])):
        raise bad(f"unknown parameter: response_format.{unknown[0]}", param=f"response_format.{unknown[0]}", code="unknown_parameter")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        inner = form.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
            raise bad("response_format.json_schema.schema: a JSON schema is needed", param="response_format")
        if unknown := sorted(set(inner) - {"name", "schema", "strict", "description"}):
            name = f"response_format.json_schema.{unknown[0]}"
            raise bad(f"unknown parameter: {name}", param=name, code="unknown_parameter")
        return Grammar("json_schema", _json(inner["schema"]))
    if kind == "structural_tag":
        return Grammar("structural_tag", _json(form))
    raise bad(f"response_format.type: {kind!r} is not text, json_object, json_schema or structural_tag", param="response_format")


def _structured(request: Common) -> Grammar:
    outputs = request.structured_outputs
    assert outputs is not None
    values = {
        name: value
        for name in outputs.__struct_fields__
        if (value := getattr(outputs, name)) is not None and not (name == "json_object" and value is False)
    }
    if len(values) != 1:
        raise bad(
            "structured_outputs: give exactly one of json, regex, choice, grammar, json_object, structural_tag", param="structured_outputs"
        )
    ((name, value),) = values.items()
    if name == "choice":
        return _choice("structured_outputs.choice", value)
    kinds: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "json_object": "json_object",
                                     "structural_tag": "structural_tag"}  # fmt: skip
    return Grammar("json_object") if name == "json_object" else _grammar(f"structured_outputs.{name}", kinds[name], value)


def _grammar(name: str, kind: GrammarKind, value: Any) -> Grammar:
    text = value if isinstance(value, str) else _json(value)
    if not text.strip():
        raise bad(f"{name}: empty", param=name)
    return Grammar(kind, text)


def _choice(name: str, words: list[str]) -> Grammar:
    if not words or not all(words):
        raise bad(f"{name}: give at least one word, and none that is empty", param=name)
    quoted = ('"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r") + '"' for word in words)
    return Grammar("ebnf", "root ::= " + " | ".join(quoted))


def _json(value: Any) -> str:
    """Key order is kept: in a schema it decides the order of the answer's properties."""
    return msgspec.json.encode(value).decode()
