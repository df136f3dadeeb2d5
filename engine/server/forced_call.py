"""A tool call that a grammar forced: the whole answer is ``{"name": ..., "arguments": {...}}``, read as it comes.

The same events as from the stream parser for calls the model makes of its own accord. Pure, and the same for every
way the text may be cut.
"""

from __future__ import annotations

import json
import re

from engine.text.events import Event, ParseFailure, ToolCallArguments, ToolCallStart

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*', re.DOTALL)


class ForcedCallParser:
    """``feed(str) -> events``, ``finish() -> events``."""

    def __init__(self) -> None:
        self._head = ""
        self._started = False
        self._ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._started:
            self._head += text
            found = _HEAD.match(self._head)
            # White space before the value may still come: begin only with its first character.
            if found is None or found.end() == len(self._head):
                return events
            self._started = True
            events.append(ToolCallStart(0, json.loads(found["name"])))
            text = self._head[found.end() :]
            self._head = ""
        if given := self._value(text):
            events.append(ToolCallArguments(0, given))
        return events

    def finish(self) -> list[Event]:
        """An answer that was cut short (for length) is no call; the failure says how far it came."""
        if self._ended:
            return []
        if self._started:
            return [ParseFailure("the answer ended inside the arguments of the tool call", 0)]
        return [ParseFailure("the answer ended before the tool call had a name")]

    def _value(self, text: str) -> str:
        """The part of ``text`` that belongs to the arguments; what follows their end is the call's own brace."""
        if self._ended:
            return ""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._ended = True
                    return text[: at + 1]
        return text
