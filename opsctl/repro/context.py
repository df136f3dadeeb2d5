"""An agent's conversation: it grows with every turn, and is cut from its oldest end before it outgrows the limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_ROOM = 0.9  # of the limit: the count of the next turn is an estimate
_PER_WORD = 2.0  # tokens, until the server has counted a turn
_TASKS = (
    "Step {n}: what do we check next, and why?",
    "Step {n}: summarise what we know so far and name one open question.",
    "Step {n}: compare the last two findings and say which is the stronger.",
)


@dataclass
class Context:
    """``limit``: tokens of prompt and answer together. ``most_tokens`` is the longest prompt that the server has counted."""

    limit: int
    max_tokens: int
    system: str = "You keep a log of an investigation. Answer in full sentences."
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0
    per_word: float = _PER_WORD
    most_tokens: int = 0

    def ask(self) -> list[dict[str, str]]:
        """The messages of the next turn, trimmed."""
        self.turn += 1
        self.messages.append({"role": "user", "content": _TASKS[self.turn % len(_TASKS)].format(n=self.turn)})
        while len(self.messages) > 1 and self.estimate() > _ROOM * (self.limit - self.max_tokens):
            del self.messages[:2]
        return [{"role": "system", "content": self.system}, *self.messages]

    def answered(self, text: str, prompt_tokens: int | None) -> None:
        """The turn came: it becomes part of the context."""
        if prompt_tokens:
            words = _words([{"content": self.system}, *self.messages])
            # The dearest turn counts: what is estimated too high is only trimmed sooner.
            self.per_word = max(1.0, prompt_tokens / max(1, words))
            self.most_tokens = max(self.most_tokens, prompt_tokens)
        self.messages.append({"role": "assistant", "content": text or "."})

    def refused(self) -> None:
        """The server found it too long: half of it goes, at once, so that the loop does not lapse."""
        self.messages.pop()
        del self.messages[: 2 * (len(self.messages) // 4 + 1)]
        self.per_word *= 1.5

    def failed(self) -> None:
        """No answer for another reason: the question is taken back."""
        self.messages.pop()

    def estimate(self) -> float:
        return self.per_word * _words([{"content": self.system}, *self.messages])


def _words(messages: Sequence[dict[str, Any]]) -> int:
    """Words, and a long string without blanks as several: random models write such."""
    return sum(sum(max(1, len(word) // 6) for word in str(message["content"]).split()) + 4 for message in messages)
