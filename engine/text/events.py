"""What the stream parsers say about an answer, and how an answer is put together from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. It always comes together with the first of its arguments, so no call stands without any."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments. Joined, the pieces are one JSON object if, and only if, the call was well-formed."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """The model's markup was wrong. ``index`` is the call that was begun and will never be complete, else None."""

    reason: str
    index: int | None = None


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ParseFailure


def merge(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one text joined and empty ones left out."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case (Content(before), Content(text)):
                merged[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                merged[-1] = Reasoning(before + text)
            case (ToolCallArguments(index, before), ToolCallArguments(same, text)) if index == same:
                merged[-1] = ToolCallArguments(index, before + text)
            case (_, Content("") | Reasoning("") | ToolCallArguments(_, "")):
                pass
            case _:
                merged.append(event)
    return merged


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    """A whole answer. A call that failed is not among ``calls``."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    failures: list[ParseFailure] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Answer:
    """The answer that a stream of events adds up to."""
    answer = Answer()
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case ToolCallStart(index, name):
                calls[index] = ToolCall(name, "")
            case ToolCallArguments(index, text):
                calls[index] = ToolCall(calls[index].name, calls[index].arguments + text)
            case ParseFailure(_, failed):
                answer.failures.append(event)
                if failed is not None:
                    calls.pop(failed, None)
    answer.calls = list(calls.values())
    return answer
