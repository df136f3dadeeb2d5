"""What class of answer a client got: the few differences that make a client work or break. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing
import referencing.exceptions

from opsctl.callers.request import schema_of, shape_of
from opsctl.rollout.reply import Reply, degenerate

NONE, DEGENERATE, INVALID = "none", "degenerate", "json invalid"


@dataclass(frozen=True)
class Answered:
    """``kind``: ``text``, ``json``, ``json invalid``, ``tool_call``, ``http NNN``, ``degenerate`` or ``none``;
    ``why`` says what made it so, without words of the answer."""

    kind: str
    why: str = ""


def classify(reply: Reply, request: Mapping[str, Any], expect: str = "text") -> Answered:
    """The class of a reply to a request. Text that happens to be JSON is ``json`` only for a client that asks for it,
    by its request or by what the fleet file expects of it."""
    if not reply.status:
        return Answered(NONE, reply.why)
    if reply.status != 200:
        return Answered(f"http {reply.status}", reply.why)
    if reply.why:
        return Answered(NONE, reply.why)
    if reply.tool_calls:
        return _called(reply, request)
    why = degenerate(reply.text)
    if why:
        return Answered(NONE if not reply.text.strip() else DEGENERATE, why)
    if shape_of(request) == "json" or expect == "json":
        return _json(reply, request)
    return Answered("text")


def _json(reply: Reply, request: Mapping[str, Any]) -> Answered:
    try:
        value = json.loads(reply.text)
    except ValueError as error:
        cut = ", and it was cut off by its token limit" if reply.finish == "length" else ""
        return Answered("text", f"asked for JSON and got text that is none (at character {getattr(error, 'pos', 0)}){cut}")
    problem = _against_schema(value, schema_of(request))
    if problem:
        return Answered(INVALID, problem)
    if (request.get("response_format") or {}).get("type") == "json_object" and not isinstance(value, dict):
        return Answered(INVALID, "valid JSON, and no object")
    return Answered("json")


def _against_schema(value: Any, schema: Any) -> str:
    if schema is None:
        return ""
    try:
        form = json.loads(schema) if isinstance(schema, str) else schema
        kind = jsonschema.validators.validator_for(form, default=jsonschema.Draft202012Validator)
        kind.check_schema(form)
        wrong = next(kind(form, registry=referencing.Registry()).iter_errors(value), None)  # no other document is fetched
    except (jsonschema.SchemaError, referencing.exceptions.Unresolvable, ValueError) as error:
        return f"the schema in the request is none: {getattr(error, 'message', error)}"
    return f"breaks its schema at {wrong.json_path} ({wrong.validator})" if wrong is not None else ""


def _called(reply: Reply, request: Mapping[str, Any]) -> Answered:
    """A call counts when the client can make it: a tool that was offered, with arguments that are a JSON object."""
    offered = {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.get("tools", ()) if "function" in tool}
    for name, arguments in reply.tool_calls:
        if name not in offered:
            return Answered("tool_call invalid", "calls a tool that was not offered")
        try:
            value = json.loads(arguments or "{}")
        except ValueError:
            return Answered("tool_call invalid", f"the arguments for {name} are no JSON")
        problem = "no object" if not isinstance(value, dict) else _against_schema(value, offered[name])
        if problem:
            return Answered("tool_call invalid", f"the arguments for {name}: {problem}")
    return Answered("tool_call")


_REMEDIES = {
    ("json", "http 400"): "stop sending response_format (or ask once more without it on this 400), and validate the JSON in the client; "
                          "engine/client.py does both",
    ("json", "text"): "validate each answer against the schema and ask again when it fails",
    ("json", "json invalid"): "validate each answer against the schema and ask again when it fails",
    ("tool_call", "text"): "handle an answer without a tool call",
    ("tool_call", "http 400"): "stop sending tool_choice, offer the tools with \"auto\" and handle an answer without a call",
    ("tool_call", "tool_call invalid"): "validate the arguments of each call before making it",
}  # fmt: skip


def remedy(before: str, after: str, own: str = "") -> str:
    """How a client has to change when its answers go from one class to another. ``own``: what the fleet file says."""
    if own:
        return own
    found = _REMEDIES.get((before, after), "")
    if found:
        return found
    return f"handle {after.upper()}" if after.startswith("http ") else f"expect {after} where it got {before}"
