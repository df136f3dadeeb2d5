"""One request and what came of it. Pure: the bytes of an answer with their times in, a record out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from opsctl.load.shapes import Shape

# What went wrong, by kind; a status that was not asked for is "http 503".
CONNECT, TIMEOUT, CUT, TOO_LONG, INVALID_JSON, JSON_BY_LENGTH, EMPTY = (
    "connect", "timeout", "cut stream", "answer without end", "invalid JSON", "JSON cut by max_tokens", "empty",
)  # fmt: skip
NOT_REFUSED, NO_TOOL_CALL, UNFINISHED, DROPPED = "not refused", "no tool call", "unfinished", "not sent"
ODD = "answer of an unknown form"
NOT_THE_SERVERS = frozenset({UNFINISHED, DROPPED})  # the run's own limits, no fault of what it asked
_LONGEST_NOTE = 120


@dataclass(frozen=True, slots=True)
class Asked:
    """Times in seconds; ``begun_s`` on the run's clock, the others from ``begun_s``. ``first_s`` is None for an answer that
    did not stream or held nothing. ``moments_s`` are those at which parts of the answer came. ``error`` is empty when what
    was expected came; ``note`` is the server's word on it, shortened. ``text`` is never written anywhere."""

    shape: str
    begun_s: float
    seconds: float
    status: int = 0
    error: str = ""
    note: str = ""
    first_s: float | None = None
    moments_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    tokens: int | None = None
    finish: str = ""
    fingerprint: str = ""
    text: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between two parts of the answer. A part may hold several tokens."""
        return tuple(b - a for a, b in zip(self.moments_s, self.moments_s[1:], strict=False))

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.tokens is None or self.tokens < 2 or len(self.moments_s) < 2:
            return None
        return (self.moments_s[-1] - self.moments_s[0]) / (self.tokens - 1)


class _Part(msgspec.Struct):
    """A ``delta`` of a stream, or a whole ``message``."""

    content: str | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Part | None = None
    message: _Part | None = None
    text: str | None = None
    finish_reason: str | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Event(msgspec.Struct):
    """An event of a stream, or a whole answer, in OpenAI's form. What a server adds to it is not looked at."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


@dataclass
class _Said:
    text: str = ""
    seen: bool = False  # any part: text, reasoning, a tool call
    calls: int = 0
    finish: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    fingerprint: str = ""
    error: str = ""
    done: bool = False


def judge(shape: Shape, begun_s: float, seconds: float, status: int, chunks: Sequence[tuple[float, bytes]], *, broke: str = "") -> Asked:
    """The record of a request whose answer came as ``chunks`` (when, what). ``broke``: the kind of what ended it."""
    said, moments = _Said(), []
    streamed = status == 200 and shape.stream
    if broke == TOO_LONG:
        chunks = ()  # to read tens of megabytes would hold up every other stream
    body = b"".join(data for _, data in chunks)
    if streamed:
        for moment, event in _events(chunks):
            if _take(said, event, delta=True):
                moments.append(moment - begun_s)
    elif status == 200 and not broke:
        _take(said, _read(body), delta=False)
        said.done = True
    error = broke or _wrong(shape, status, said)
    return Asked(
        shape.name, begun_s, seconds, status, error, _note(said, body) if error else "",
        moments[0] if moments else None, tuple(moments), said.prompt_tokens, said.tokens, said.finish, said.fingerprint, said.text,
    )  # fmt: skip


def _events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, _Event | str | None]]:
    """The events of a stream, each with the time at which its last byte came. ``[DONE]`` is None, a kind of error a str."""
    rest: list[bytes] = []
    for moment, data in chunks:
        first, *lines = data.split(b"\n")
        rest.append(first)
        if not lines:
            continue
        lines = [b"".join(rest), *lines]
        rest = [lines.pop()]
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                yield moment, None
                continue
            yield moment, _read(value)


def _read(data: bytes) -> _Event | str:
    """An event, or the kind of what is wrong with it."""
    try:
        return _EVENTS.decode(data)
    except msgspec.ValidationError:
        return ODD
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return INVALID_JSON


def _take(said: _Said, event: _Event | str | None, *, delta: bool) -> bool:
    """Add an event; whether it holds a part of the answer."""
    if event is None:
        said.done = True
        return False
    if isinstance(event, str):
        said.error = event
        return False
    if event.error:
        said.error = "error in the stream" if delta else INVALID_JSON
        return False
    said.fingerprint = event.system_fingerprint or said.fingerprint
    if event.usage is not None:
        said.prompt_tokens, said.tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    part = False
    for choice in event.choices or ():
        message = (choice.delta if delta else choice.message) or _Part()
        text = choice.text or message.content or ""
        calls = message.tool_calls or ()
        said.text += text
        said.calls += len(calls)
        said.finish = choice.finish_reason or said.finish
        part = part or bool(text or calls or message.reasoning_content or message.reasoning)
    said.seen = said.seen or part
    return part


def _wrong(shape: Shape, status: int, said: _Said) -> str:
    """Why this is not what was expected; empty when it is."""
    word, _, code = shape.expect.partition(" ")
    if word == "http":
        return "" if status == int(code) else NOT_REFUSED if status == 200 else f"http {status}"
    if status != 200:
        return f"http {status}"
    if said.error:
        return said.error
    if not said.done and not said.finish:
        return CUT
    if shape.expect == "tool_call" and not said.calls:
        return NO_TOOL_CALL
    if not said.seen:
        return EMPTY
    if shape.expect == "json":
        try:
            json.loads(said.text)
        except (ValueError, RecursionError):
            return JSON_BY_LENGTH if said.finish == "length" else INVALID_JSON
    return ""


def _note(said: _Said, body: bytes) -> str:
    """The error's own message, one line of it: never the answer's text."""
    try:
        found = msgspec.json.decode(body)
        message = found.get("error", found) if isinstance(found, dict) else {}
        text = str(message.get("message", "")) if isinstance(message, dict) else str(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = ""
    return text.partition("\n")[0][:_LONGEST_NOTE]
