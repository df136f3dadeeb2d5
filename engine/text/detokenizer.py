"""Ids to text, a few at a time: what has been given never changes, and all of it is what one decoding would give."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental decoding of one answer.

    A byte-level vocabulary goes through an incremental UTF-8 decoder, in linear time. Any other is decoded by window:
    the last piece that gave text, and what came since, so that rules about the beginning of a text or about
    neighbours see what they need. There a run of byte tokens is held back whole, because one bad byte in it changes
    how all of it reads.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if tokenizer.byte_level else None
        self._context: list[int] = []
        self._new: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is certain with these ids; it may be empty."""
        if self._utf8 is not None:
            data = b"".join(self._tokenizer.byte_level_bytes(token) for token in ids if token not in self._skip)
            return self._utf8.decode(data)
        return "".join(self._window(token) for token in ids if token not in self._skip and self._tokenizer.knows(token))

    def finish(self) -> str:
        """The rest, U+FFFD standing for a character that was never completed."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text = self._fresh_text()
        self._context, self._new = [*self._context, *self._new], []
        return text

    def _window(self, token: int) -> str:
        # A byte run ends with the first token that is no byte: what was held is given then, not together with the token,
        # whose own text may still be held.
        text = ""
        if self._new and self._held() and not self._tokenizer.is_byte_piece(token) and self._tokenizer.is_byte_piece(self._new[-1]):
            text = self._advance()
        self._new.append(token)
        return text if self._held() else text + self._advance()

    def _held(self) -> bool:
        return self._tokenizer.is_byte_piece(self._new[-1])

    def _advance(self) -> str:
        text = self._fresh_text()
        if not text or (text.endswith(REPLACEMENT) and not self._tokenizer.is_byte_piece(self._new[-1])):
            return ""
        self._context, self._new = self._new, []
        return text

    def _fresh_text(self) -> str:
        known = self._tokenizer.decode(self._context, skip_special=False)
        return self._tokenizer.decode([*self._context, *self._new], skip_special=False)[len(known) :]
