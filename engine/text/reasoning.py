"""Reasoning between ``<think>`` and ``</think>``, told apart from the answer as it streams."""

from __future__ import annotations

from enum import Enum, auto

from engine.text.events import Content, Event, Reasoning, merge
from engine.text.markers import held_back

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    START = auto()  # nothing but white space so far
    INSIDE = auto()
    AFTER = auto()  # white space after the closer is dropped
    CONTENT = auto()


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside reasoning, so that the answer begins there without an opener."""
    return prompt.rstrip().endswith(OPEN)


class ThinkParser:
    """One block of reasoning, at the very beginning of the answer.

    A later ``<think>`` is content: the model speaks about it. White space around the block's own text is dropped.
    Whatever stands inside, markup of tool calls too, is reasoning. An answer that ends inside stays reasoning.
    """

    def __init__(self, starts_inside: bool = False) -> None:
        self._state = _State.INSIDE if starts_inside else _State.START
        self._pending = ""
        self._began = False
        self._may_open = starts_inside  # some models write the opener that the prompt already holds

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        events: list[Event] = []
        state = None
        while state is not self._state:
            state = self._state
            match state:
                case _State.START:
                    self._start()
                case _State.INSIDE:
                    self._inside(events)
                case _State.AFTER:
                    self._pending = self._pending.lstrip()
                    if self._pending:
                        self._state = _State.CONTENT
                case _State.CONTENT:
                    events.append(Content(self._take(len(self._pending))))
        return merge(events)

    def finish(self) -> list[Event]:
        """What was held back."""
        rest = self._take(len(self._pending))
        match self._state:
            case _State.INSIDE:
                rest = rest.rstrip() if self._began else rest.strip()
                return merge([Reasoning(rest)])
            case _State.AFTER:
                return []
            case _:
                return merge([Content(rest)])

    def _take(self, size: int) -> str:
        taken, self._pending = self._pending[:size], self._pending[size:]
        return taken

    def _start(self) -> None:
        head = self._pending.lstrip()
        if head.startswith(OPEN):
            self._pending = head[len(OPEN) :]
            self._state = _State.INSIDE
        elif not OPEN.startswith(head):
            self._state = _State.CONTENT

    def _inside(self, events: list[Event]) -> None:
        if not self._began:
            head = self._pending.lstrip()
            if self._may_open and head and OPEN.startswith(head) and head != OPEN:
                return
            if self._may_open and head.startswith(OPEN):
                head = head[len(OPEN) :].lstrip()
                self._may_open = False
            self._pending = head
            if not head:
                return
        at = self._pending.find(CLOSE)
        if at >= 0:
            events.append(Reasoning(self._take(at).rstrip()))
            self._take(len(CLOSE))
            self._state = _State.AFTER
            return
        sure = self._pending[: len(self._pending) - held_back(self._pending, (CLOSE,))].rstrip()
        if sure:
            self._began = True
            self._may_open = False
            events.append(Reasoning(self._take(len(sure))))
