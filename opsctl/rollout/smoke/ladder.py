"""The rungs above a plain completion: streaming, a long context, several at once, a forced tool call, JSON.

A rung is judged by the class of its answer. One that a server could not climb before the change need not be climbed
after it, but none may be lost; a refusal that the plan foresees (400 under ``--grammar-backend none``) is no loss.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opsctl.callers.answer import Answered, classify
from opsctl.callers.matrix import Ask
from opsctl.callers.request import Shape, shape_of
from opsctl.rollout.reply import Reply

AT_ONCE = 4
TRIES = 3
_LONG_TOKENS = 2048
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_CONSTRAINED = ("json", "grammar", "forced_tool")  # one machinery: where one is dangerous beside traffic, so are the others


@dataclass(frozen=True)
class Climbed:
    """``kind``: what class of answer came; ``detail`` for people."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Rung:
    """``want`` is the class of a climbed rung; ``climb`` tries it once."""

    name: str
    shape: Shape
    want: str
    climb: Callable[[], Climbed]


def rungs(ask: Ask, nonce: Callable[[], str], *, context: int, faulty: Callable[[Reply], str]) -> tuple[Rung, ...]:
    """``ask`` may be called from several threads. ``context`` is the server's context length in tokens (0: not known);
    ``faulty`` says why a 200 is not this server's good answer, empty when it is."""

    def send(request: Mapping[str, Any]) -> tuple[Reply, Answered]:
        reply = ask(request)
        found = classify(reply, request)
        why = faulty(reply) if found.kind not in ("none", "degenerate") and reply.status == 200 else ""
        return reply, Answered("faulty", why) if why else found

    def plain(request: Mapping[str, Any]) -> Climbed:
        reply, found = send(request)
        return Climbed(found.kind, found.why or f"{found.kind} in {reply.seconds:.2f} s")

    def streaming() -> Climbed:
        reply, found = send({**_text(nonce()), "stream": True})
        if found.kind == "text" and not reply.pieces:
            return Climbed("none", "the stream bore nothing")
        return Climbed(found.kind, found.why or f"{reply.pieces} events in {reply.seconds:.2f} s")

    def long() -> Climbed:
        tokens = min(context // 2, _LONG_TOKENS) if context else _LONG_TOKENS // 4
        words = max(16, int(tokens * 0.7))
        while True:  # how many tokens a word takes is the tokenizer's affair: too many are refused, then fewer are sent
            reply, found = send(_text(nonce(), words))
            if reply.status != 400 or words <= 16:
                break
            words //= 2
        return Climbed(found.kind, found.why or f"{reply.prompt_tokens or words} tokens of prompt in {reply.seconds:.2f} s")

    def concurrent_() -> Climbed:
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="rung") as pool:
            found = [one for _, one in pool.map(send, [_text(nonce()) for _ in range(AT_ONCE)])]
        bad = next((one for one in found if one.kind != "text"), None)
        return Climbed(bad.kind, f"one of {AT_ONCE} at once: {bad.why}") if bad else Climbed("text", f"{AT_ONCE} at once")

    return (
        Rung("streaming", "text", "text", streaming),
        Rung("long context", "text", "text", long),
        Rung("concurrent", "text", "text", concurrent_),
        Rung("tool call", "forced_tool", "tool_call", lambda: plain(_tool(nonce()))),
        Rung("json", "json", "json", lambda: plain(_json(nonce()))),
    )


def climb(rung: Rung, enough: Callable[[str], bool]) -> Climbed:
    """Up to three times, since models vary: the first that is enough, else the last."""
    found = rung.climb()
    for _ in range(TRIES - 1):
        if enough(found.kind):
            break
        found = rung.climb()
    return found


def left_out(rung: Rung, never_live: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rung has the shape of a request that must not be sent beside live traffic."""
    shapes = {shape_of(request) for request in never_live}
    return rung.shape in shapes or (rung.shape in _CONSTRAINED and bool(shapes.intersection(_CONSTRAINED)))


def _text(nonce: str, words: int = 8) -> dict[str, Any]:
    count = " ".join(_WORDS[at % len(_WORDS)] for at in range(words))
    # A question of its own behind the words: small models say nothing at all of a long text that asks nothing.
    content = f"[{nonce}] {count}.\n\nWhat is the capital of France? Answer in one sentence."
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16}


def _tool(nonce: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "answer", "description": "Give the answer.", "parameters": parameters}}
    content = f"[{nonce}] Is water wet? Answer with the tool."
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64, "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "answer"}}}  # fmt: skip


def _json(nonce: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"], "additionalProperties": False}
    content = f'[{nonce}] Name a colour, red or green, as JSON: {{"colour": ...}}.'
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64,
            "response_format": {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}}  # fmt: skip
