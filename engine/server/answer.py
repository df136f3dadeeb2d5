"""What the two routes' answers have in common: choices that grow, and the usage at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.messages import Generate, Tokens
from engine.server.choice import Choice


@dataclass
class Delta:
    """A part of a choice to stream: ``body`` holds OpenAI's fields of the choice beside index and finish_reason."""

    index: int
    body: dict[str, Any]
    finish: str | None = None
    matched: int | str | None = None


class Answer(Protocol):
    """An answer of one route. Fed in order, it gives both forms: deltas as they come and the whole at the end."""

    object_name: str
    chunk_name: str
    choices: list[Choice]

    def opening(self) -> list[Delta]: ...

    def feed(self, index: int, message: Tokens) -> list[Delta]: ...

    def whole(self) -> list[dict[str, Any]]: ...

    def ended(self, index: int) -> bool: ...

    def finish_reason(self, index: int) -> str: ...


@dataclass(frozen=True)
class Job:
    """An admitted request: what to send, and what to make of what comes back."""

    requests: Sequence[Generate]
    n: int
    answer: Answer
    id_prefix: str
    stream: bool
    include_usage: bool = False

    def usage(self) -> dict[str, Any]:
        """Tokens of each prompt once, whatever ``n``, and of every answer."""
        prompt = sum(len(request.input_ids) for request in self.requests[:: self.n])
        completion = sum(choice.used for choice in self.answer.choices)
        cached = sum(choice.cached for choice in self.answer.choices[:: self.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
