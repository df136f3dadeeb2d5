"""What one kind of client sends: its shape, and the same request with a nonce in it. Pure."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

Shape = Literal["text", "json", "grammar", "tool", "forced_tool"]
_GRAMMARS = ("regex", "ebnf", "structural_tag", "guided_regex", "guided_grammar", "guided_choice")


def shape_of(request: Mapping[str, Any]) -> Shape:
    """What form the request asks of its answer. ``forced_tool``: a call that the server has to enforce."""
    form = (request.get("response_format") or {}).get("type", "text")
    outputs = request.get("structured_outputs") or {}
    if form in ("json_object", "json_schema") or request.get("guided_json") is not None or {"json", "json_object"} & set(outputs):
        return "json"
    if form == "structural_tag" or outputs or any(request.get(name) is not None for name in _GRAMMARS):
        return "grammar"
    choice = request.get("tool_choice", "auto")
    if request.get("tools") and choice != "none":
        return "tool" if choice == "auto" else "forced_tool"
    return "text"


def schema_of(request: Mapping[str, Any]) -> Any:
    """The JSON schema that the answer must follow; None when the request names none."""
    form = request.get("response_format") or {}
    if form.get("type") == "json_schema":
        return (form.get("json_schema") or {}).get("schema")
    return request.get("guided_json") or (request.get("structured_outputs") or {}).get("json")


def with_nonce(request: Mapping[str, Any], nonce: str) -> dict[str, Any]:
    """A copy whose last user message (or prompt) begins with the nonce, so that nobody has asked it before: no cache
    can answer it, and its line in a log can be found."""
    mark = f"[{nonce}] "
    found = copy.deepcopy(dict(request))
    if "messages" not in found:
        found["prompt"] = mark + str(found.get("prompt", ""))
        return found
    message = _last_of_user(found["messages"])
    content = message.get("content")
    if isinstance(content, list):
        part = next((part for part in content if part.get("type") == "text"), None)
        if part is None:
            content.insert(0, {"type": "text", "text": mark})
        else:
            part["text"] = mark + part["text"]
    else:
        message["content"] = mark + (content or "")
    return found


def prompt_sha(request: Mapping[str, Any]) -> str:
    """First 8 hex digits of the SHA-256 of the text of the last user message (of the prompt), as the engine logs it."""
    if "messages" not in request:
        text = str(request.get("prompt", ""))
    else:
        content = _last_of_user(request["messages"]).get("content")
        text = "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _last_of_user(messages: list[dict[str, Any]]) -> dict[str, Any]:
    users = [message for message in messages if message.get("role") == "user"]
    return (users or messages)[-1]
