"""Read what a request was answered with: a stream of server-sent events, or one JSON body.

Chat completions, completions, the Responses API and Anthropic's messages are told apart by their shape. Texts are
joined per channel, because a marker may be cut anywhere between two chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from monitors.judge.scene import Answer, Cite

_MOST_CHARACTERS = 4 << 20
_REASONING = ("reasoning_content", "reasoning", "reasoning_text", "thinking")


@dataclass
class _Joined:
    artefact: str
    texts: dict[str, list[str]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    tool_calls: int = 0
    finish: str = ""
    model: str = ""
    fingerprint: str = ""
    tokens: int | None = None
    ended: bool = False

    def add(self, channel: str, text: object, line: int) -> None:
        if isinstance(text, str) and text:
            self.texts.setdefault(channel, []).append(text)
            self.lines.setdefault(channel, line)

    def done(self) -> Answer:
        texts = {channel: "".join(parts)[:_MOST_CHARACTERS] for channel, parts in self.texts.items()}
        return Answer(texts, self.lines, self.tool_calls, self.finish, self.model, self.fingerprint, self.tokens, self.ended,
                      Cite(self.artefact, min(self.lines.values(), default=0)))  # fmt: skip


def from_sse(text: str, artefact: str) -> Answer:
    """A recorded stream. Raises ValueError when no line of it is an event with JSON."""
    joined = _Joined(artefact)
    events = 0
    for number, raw in _events(text):
        if raw is None:
            joined.ended = True
            continue
        events += 1
        _take(raw, joined, number)
    if not events:
        raise ValueError("no event with JSON in it")
    return joined.done()


def from_json(text: str, artefact: str) -> Answer:
    """One answer. Raises ValueError when it is no JSON object."""
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    joined = _Joined(artefact, ended=True)
    _take(raw, joined, 1)
    return joined.done()


def _events(text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each event's number of line and object; None for the end mark."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            yield number, None
            continue
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError):
            continue  # cut in the middle
        if isinstance(raw, dict):
            yield number, raw


def _take(raw: Mapping[str, Any], joined: _Joined, line: int) -> None:
    joined.model = _text(raw.get("model")) or joined.model
    joined.fingerprint = _text(raw.get("system_fingerprint")) or joined.fingerprint
    usage = raw.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        joined.tokens = usage["completion_tokens"]
    for choice in _dicts(raw.get("choices")):
        joined.finish = _text(choice.get("finish_reason")) or joined.finish
        joined.ended = joined.ended or bool(joined.finish)
        joined.add("content", choice.get("text"), line)
        for part in (choice.get("delta"), choice.get("message")):
            if isinstance(part, dict):
                _part(part, joined, line)
    kind = _text(raw.get("type"))
    if kind.endswith(".delta") or kind == "content_block_delta":
        delta = raw.get("delta")
        if isinstance(delta, dict):
            _part(delta, joined, line)
            joined.add("content", delta.get("text"), line)
            joined.add("arguments", delta.get("partial_json"), line)
        else:
            channel = "reasoning" if "reasoning" in kind else "arguments" if "arguments" in kind else "content"
            joined.add(channel, delta, line)
    if kind in ("response.completed", "message_stop"):
        joined.ended = True
    for item in _dicts(raw.get("output")):
        if item.get("type") == "function_call":
            joined.tool_calls += 1
            joined.add("arguments", item.get("arguments"), line)
        for part in _dicts(item.get("content")):
            joined.add("reasoning" if item.get("type") == "reasoning" else "content", part.get("text"), line)


def _part(part: Mapping[str, Any], joined: _Joined, line: int) -> None:
    content = part.get("content")
    if isinstance(content, list):
        for piece in _dicts(content):
            joined.add("content", piece.get("text"), line)
    else:
        joined.add("content", content, line)
    for name in _REASONING:
        joined.add("reasoning", part.get(name), line)
    for call in _dicts(part.get("tool_calls")):
        joined.tool_calls += 1
        function = call.get("function")
        if isinstance(function, dict):
            joined.add("arguments", function.get("arguments"), line)
            joined.add("arguments", function.get("name"), line)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
