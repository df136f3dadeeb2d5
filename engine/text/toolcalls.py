"""Tool calls in Hermes markup: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

A pure machine over characters, so the way a text was cut cannot change what it says. Once a block is open nothing in
it becomes content. Arguments are given as they are written, except that the brace which closes them waits until the
whole call is known to be well-formed: a call that breaks off never reads as complete JSON.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any, NoReturn

from engine.text.events import Content, Event, ParseFailure, ToolCallArguments, ToolCallStart, merge
from engine.text.jsonscan import ObjectScanner, ScanError, Where
from engine.text.markers import first_marker, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = (OPEN, CLOSE)


class _State(Enum):
    TEXT = auto()
    CALL = auto()
    TAIL = auto()  # the call is complete, its closer is due
    SKIP = auto()  # the block is broken: everything up to the next marker is dropped


class HermesParser:
    """Content and tool calls of one answer. White space beside a block is dropped, but for what parts two pieces of content.

    ``forbidden``: calls were ruled out (tool_choice none); a block is then a failure and shows as nothing.
    """

    def __init__(self, forbidden: bool = False) -> None:
        self._forbidden = forbidden
        self._state = _State.TEXT
        self._pending = ""
        self._space = ""  # white space that is content only if content follows
        self._after_block = False  # and no content came since
        self._said = False  # some content was given
        self._calls = 0
        self._call = _Call(0)

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        events: list[Event] = []
        while self._step(events):
            pass
        return merge(events)

    def finish(self) -> list[Event]:
        """The answer has ended: what was held back, and the failure of a call that was cut off."""
        events: list[Event] = []
        rest, self._pending = self._pending, ""
        if self._state is _State.TEXT:
            self._say(rest, events)
            if self._space and not self._after_block:
                events.append(Content(self._space))
        elif self._state is _State.CALL:
            events.append(self._call.failure("the answer ended inside a tool call"))
        self._state = _State.TEXT
        return merge(events)

    def _step(self, events: list[Event]) -> bool:
        """Read as far as one state goes; false when more text is needed."""
        match self._state:
            case _State.TEXT:
                return self._text(events)
            case _State.CALL:
                return self._read_call(events)
            case _State.TAIL:
                return self._tail(events)
            case _State.SKIP:
                found = first_marker(self._pending, _MARKERS)
                if found is None:
                    self._pending = self._pending[len(self._pending) - held_back(self._pending, _MARKERS) :]
                    return False
                self._enter(found[1], found[0] + len(found[1]), events)
                return True

    def _text(self, events: list[Event]) -> bool:
        found = first_marker(self._pending, _MARKERS)
        if found is None:
            sure = len(self._pending) - held_back(self._pending, _MARKERS)
            self._say(self._pending[:sure], events)
            self._pending = self._pending[sure:]
            return False
        at, marker = found
        self._say(self._pending[:at], events)
        if marker == CLOSE:
            events.append(ParseFailure("a closing tag without a tool call"))
        self._enter(marker, at + len(marker), events)
        return True

    def _enter(self, marker: str, size: int, events: list[Event]) -> None:
        """Go on behind a marker of ``size`` characters from the beginning of what is pending."""
        self._pending = self._pending[size:]
        self._space = ""
        self._after_block = True
        if marker == CLOSE:
            self._state = _State.TEXT
        elif self._forbidden:
            events.append(ParseFailure("a tool call although tool_choice is none"))
            self._state = _State.SKIP
        else:
            self._call = _Call(self._calls)
            self._state = _State.CALL

    def _say(self, text: str, events: list[Event]) -> None:
        text = self._space + text
        if self._after_block and not self._said:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._after_block, self._said = False, True
            events.append(Content(body))

    def _read_call(self, events: list[Event]) -> bool:
        call = self._call
        try:
            used = call.feed(self._pending, events)
        except ScanError as error:
            self._pending = self._pending[call.used :]
            events.append(call.failure(f"a malformed tool call: {error}"))
            self._state = _State.SKIP
            self._calls += call.started
            return True
        self._pending = self._pending[used:]
        if call.done:
            self._state = _State.TAIL
            self._calls += 1
        return call.done

    def _tail(self, events: list[Event]) -> bool:
        self._pending = self._pending.lstrip()
        for marker in _MARKERS:
            if self._pending.startswith(marker):
                self._enter(marker, len(marker), events)
                return True
        if any(marker.startswith(self._pending) for marker in _MARKERS):
            return False
        events.append(ParseFailure("text between a tool call and its closing tag"))
        self._state = _State.SKIP
        return True


class _Call:
    """One block as it is read: scanner, name, and how much of the arguments was given out."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started = False
        self.done = False
        self.used = 0  # characters of the last feed that were read, for the caller that catches its ScanError
        self._scanner = ObjectScanner()
        self._name: str | None = None
        self._arguments: tuple[int, int | None] | None = None  # their slice of the scanner's raw text
        self._quoted = False  # arguments written as a JSON string that holds JSON
        self._given = 0  # up to where raw text was given out

    def failure(self, reason: str) -> ParseFailure:
        return ParseFailure(reason, self.index if self.started else None)

    def feed(self, text: str, events: list[Event]) -> int:
        """Read up to the end of the object; the number of characters read.

        Raises:
            ScanError: the call is malformed; ``used`` is where. What was right before it is among the events.
        """
        scanner = self._scanner
        self.used = 0
        try:
            for self.used, char in enumerate(text):
                began = scanner.where is Where.VALUE
                if scanner.push(char):
                    self._value_ended()
                if began and scanner.where is Where.IN_VALUE and scanner.key == "arguments":
                    self._arguments_begin(char)
                if scanner.where is Where.DONE:
                    self._judge()
                    self.done = True
                    break
        finally:
            self._give(events)
        return self.used + 1 if text else 0

    def _arguments_begin(self, char: str) -> None:
        if self._arguments is not None:
            raise ScanError("arguments are given twice")
        if char not in '{"':
            raise ScanError("arguments are no object")
        self._quoted = char == '"'
        self._arguments = (self._scanner.value_start, None)
        self._given = self._scanner.value_start

    def _value_ended(self) -> None:
        scanner = self._scanner
        if scanner.value_end is None:
            return
        if scanner.key == "arguments" and self._arguments is not None and self._arguments[1] is None:
            self._arguments = (self._arguments[0], scanner.value_end)
        elif scanner.key == "name" and self._name is None:
            name = _strict_json(scanner.raw[scanner.value_start : scanner.value_end])
            if not isinstance(name, str) or not name:
                raise ScanError("the name is no text")
            self._name = name

    def _judge(self) -> None:
        """The object is closed: is it a call?"""
        call = _strict_json(self._scanner.raw)
        if self._name is None or call.get("name") != self._name:
            raise ScanError("no name, or more than one")
        if self._arguments is None:
            raise ScanError("no arguments")
        arguments = call["arguments"]
        if self._quoted:
            arguments = _strict_json(arguments)
        if not isinstance(arguments, dict):
            raise ScanError("arguments are no object")

    def _give(self, events: list[Event]) -> None:
        """Give out what is certain of the arguments: all but their last brace, and that when the call is complete."""
        if self._name is None or self._arguments is None:
            return
        start, end = self._arguments
        if self._quoted:
            if not self.done:
                return
            text = json.loads(self._scanner.raw[start:end]).strip()
        else:
            upto = self._scanner.size if end is None else end if self.done else end - 1
            text = self._scanner.raw[self._given : upto]
            self._given = max(self._given, upto)
        if text and not self.started:
            self.started = True
            events.append(ToolCallStart(self.index, self._name))
        if text:
            events.append(ToolCallArguments(self.index, text))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is repeated")
    return made


def _strict_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise ScanError(f"not JSON: {error}") from error
