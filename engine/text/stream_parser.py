"""The parsers of an answer's text, stacked: reasoning first, tool calls in what is left."""

from __future__ import annotations

from typing import Protocol

from engine.text.events import Content, Event, merge
from engine.text.reasoning import ThinkParser
from engine.text.toolcalls import HermesParser


class TextParser(Protocol):
    """A machine over an answer's text: ``feed`` pieces in order, then ``finish`` once."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def reasoning_parser(name: str, *, starts_inside: bool = False) -> TextParser | None:
    """The parser that ``--reasoning-parser`` names. ``starts_inside``: see ``reasoning.opens_reasoning``."""
    match name:
        case "think":
            return ThinkParser(starts_inside)
        case "none":
            return None
    raise ValueError(f"--reasoning-parser: {name!r} is not one of think, none")


def tool_parser(name: str, *, forbidden: bool = False) -> TextParser | None:
    """The parser that ``--tool-call-parser`` names. ``forbidden``: calls are markup to drop, not to make."""
    match name:
        case "hermes":
            return HermesParser(forbidden)
        case "none":
            return None
    raise ValueError(f"--tool-call-parser: {name!r} is not one of hermes, none")


class StreamParser:
    """Both, either or neither; without any, all text is content."""

    def __init__(self, reasoning: TextParser | None = None, tools: TextParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Event]:
        first: list[Event] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return merge(self._through_tools(first))

    def finish(self) -> list[Event]:
        events = self._through_tools([] if self._reasoning is None else self._reasoning.finish())
        return merge([*events, *(self._tools.finish() if self._tools is not None else [])])

    def _through_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        made: list[Event] = []
        for event in events:
            made += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return made
