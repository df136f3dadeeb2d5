"""One answer as it grows: tokens in, certain text out, and where and why it ended.

Stop strings are found here, after detokenising, because a stop string need not begin or end where a token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.messages import TokenLogprob, Tokens
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopStrings
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenAt:
    """A token's log-probabilities, with where its text begins in the answer (characters)."""

    logprob: TokenLogprob
    offset: int


@dataclass
class Piece:
    """What one message added. ``tokens`` are those that belong to this text or to text still held back."""

    text: str = ""
    tokens: list[TokenAt] = field(default_factory=list)


class Choice:
    """``finish`` is empty while it goes on, then ``stop`` or ``length``; after a stop string the scheduler does not know
    yet and must be told. ``used`` counts the answer's tokens, those of the stop string and the stop token too."""

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), skip_special: bool = True, min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._length = 0
        self.used = 0
        self.cached = 0
        self.finish = ""
        self.matched: int | str | None = None

    def feed(self, message: Tokens) -> Piece:
        piece = Piece()
        self.cached = max(self.cached, message.cached_tokens)
        # The stop token ends the answer and is not part of its text.
        stop_at = len(message.ids) - 1 if message.finish == "stop" and message.matched is not None else len(message.ids)
        for at, token in enumerate(message.ids):
            self.used += 1
            if at == stop_at:
                break
            if at < len(message.logprobs):
                piece.tokens.append(TokenAt(message.logprobs[at], self._length))
            text = self._detokenizer.feed([token])
            self._length += len(text)
            if self._pass(text, piece):
                return piece
        if message.finish:
            rest = self._detokenizer.finish()
            if not self._pass(rest, piece):
                piece.text += self._stops.finish()
                self.finish, self.matched = message.finish, message.matched
        return piece

    def _pass(self, text: str, piece: Piece) -> bool:
        """Let text through the stop strings; True when one of them ended the answer."""
        if self.used <= self._min_tokens:
            piece.text += text
            return False
        passed, matched = self._stops.feed(text)
        piece.text += passed
        if matched is None:
            return False
        self.finish, self.matched = "stop", matched
        return True
