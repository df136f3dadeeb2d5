"""One answer of an OpenAI-shaped API as a client sees it, whole or streamed. Pure: bytes in, a ``Reply`` out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """``status`` 0: no answer came; ``why`` says what went wrong, empty for a usable answer. ``tool_calls`` are (name,
    arguments as text). ``pieces``: how many events of a stream bore something; 0 for an answer that was not streamed."""

    status: int
    text: str = ""
    finish: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    fingerprint: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    pieces: int = 0
    seconds: float = 0.0
    why: str = ""
    rid: str = ""  # under which the request was sent


def whole(status: int, body: bytes, seconds: float) -> Reply:
    """An answer that came in one piece."""
    try:
        found = json.loads(body)
    except ValueError:
        return Reply(status, seconds=seconds, why=f"HTTP {status} and no JSON")
    if status != 200:
        return Reply(status, seconds=seconds, why=error_text(found))
    try:
        choice = found["choices"][0]
        message = choice.get("message") or {"content": choice.get("text")}
        calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
        usage = found.get("usage") or {}
        return Reply(
            status, message.get("content") or message.get("reasoning_content") or "", choice.get("finish_reason") or "", calls,
            found.get("system_fingerprint") or "", int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0),
            seconds=seconds,
        )  # fmt: skip
    except (LookupError, TypeError, AttributeError) as error:
        return Reply(status, seconds=seconds, why=f"not a completion: {error!r}")


def streamed(lines: Iterable[str]) -> Reply:
    """An answer of server-sent events. One that does not end with ``[DONE]`` was cut off."""
    text, reasoning, finish, fingerprint, pieces, done = "", "", "", "", 0, False
    usage: Mapping[str, Any] = {}
    calls: dict[int, list[str]] = {}
    try:
        for event in _events(lines):
            if event == "[DONE]":
                done = True
                break
            found = json.loads(event)
            if "error" in found:
                return Reply(200, text, pieces=pieces, why=f"an error in the stream: {error_text(found)}")
            usage = found.get("usage") or usage
            fingerprint = found.get("system_fingerprint") or fingerprint
            for choice in found.get("choices", ()):
                delta = choice.get("delta") or {"content": choice.get("text")}
                piece = delta.get("content") or ""
                thought = delta.get("reasoning_content") or ""
                called = delta.get("tool_calls") or ()
                for call in called:
                    one = calls.setdefault(int(call.get("index", 0)), ["", ""])
                    function = call.get("function") or {}
                    one[0] += function.get("name") or ""
                    one[1] += function.get("arguments") or ""
                pieces += bool(piece or thought or called)
                text, reasoning, finish = text + piece, reasoning + thought, choice.get("finish_reason") or finish
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Reply(200, text, pieces=pieces, why=f"not a stream of completions: {error!r}")
    return Reply(
        200, text or reasoning, finish, tuple((name, arguments) for name, arguments in calls.values()), fingerprint,
        int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), pieces,
        why="" if done else "the stream ended without [DONE]",
    )  # fmt: skip


def _events(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data:"):
            yield line[5:].strip()


def error_text(body: Any) -> str:
    """The message of an error in OpenAI's shape, or in SGLang's and vLLM's flat one."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    found = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(found)[:300]


def degenerate(text: str) -> str:
    """Why this text is no answer; empty when it may be one.

    A judge of form alone: nothing, or one character over and over, which is what logits that are not
    numbers decode to. It cannot see fluent nonsense (the drift check does), and it lets undecodable bytes pass, since
    a model of random weights writes them.
    """
    stripped = text.strip()
    if not stripped:
        return "the answer is empty"
    if len(stripped) >= 16 and len(set(stripped)) == 1 and stripped[0] != "\ufffd":
        return f"the answer is one character, {stripped[0]!r}, {len(stripped)} times"
    return ""
