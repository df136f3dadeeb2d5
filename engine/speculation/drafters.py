"""Drafters: who guesses the next tokens of a request. A wrong guess costs time and never changes the answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Drafter(Protocol):
    """The drafter of one request. Every rank has its own copy, so the same calls must give the same drafts."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Take note of accepted tokens (first of all the prompt), in order."""
        ...

    def propose(self, k: int) -> list[int]:
        """At most ``k`` tokens that may come next; the state does not change."""
        ...


class NullDrafter:
    """Never guesses."""

    def extend(self, tokens: Iterable[int]) -> None:
        pass

    def propose(self, k: int) -> list[int]:
        return []


class NgramDrafter:
    """Prompt look-up: what followed the last time that the text ended as it does now.

    The longest suffix of ``min_match..max_match`` tokens that occurred before decides, and of its occurrences the
    last. The continuation is copied token by token, from the copy itself where it reaches the end of the text, so
    that a repetition goes on. (Saxena, "Prompt Lookup Decoding", 2023.)

    An index maps each n-gram to where its last occurrence was continued: ``max_match - min_match + 1`` entries are
    written for each token, and a look-up reads as many.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"n-gram drafter: needs 1 <= min_match <= max_match, got {min_match} and {max_match}")
        self._sizes = range(min_match, max_match + 1)
        self._tokens: list[int] = []
        self._continued: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        known = self._tokens
        for token in tokens:
            end = len(known)
            # Only now does the n-gram at the end have a continuation, so a suffix never finds itself.
            for size in self._sizes:
                if size > end:
                    break
                self._continued[tuple(known[end - size :])] = end
            known.append(token)

    def propose(self, k: int) -> list[int]:
        if k <= 0:
            return []
        known = self._tokens
        for size in reversed(self._sizes):
            if size > len(known):
                continue
            start = self._continued.get(tuple(known[-size:]))
            if start is not None:
                drafts: list[int] = []
                for at in range(start, start + k):
                    drafts.append(known[at] if at < len(known) else drafts[at - len(known)])
                return drafts
        return []
