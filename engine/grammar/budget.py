"""What one request's grammar may cost a step.

Every request of a batch waits for all masks. Most take microseconds, but a grammar that can read the same text in many
ways costs more with every token: the cube of the text's length for ``s ::= s s | "a"``. So each request has an allowance
of CPU time a step; what it leaves unused pays back what it overdrew, and one that stays overdrawn ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.grammar.backends import GrammarError, Matcher

if TYPE_CHECKING:
    import torch

STEPS = 25
"""Allowances that may be overdrawn before the request ends."""


class GrammarTooDear(GrammarError):
    """The client's grammar costs everybody else too much."""


class Budgeted:
    """A matcher whose time is counted. ``clock`` gives CPU seconds of this thread: a crowded machine is not its fault."""

    def __init__(self, matcher: Matcher, allowance_s: float, clock: Callable[[], float] = time.thread_time) -> None:
        self._matcher = matcher
        self._allowance_s = allowance_s
        self._clock = clock
        self._overdrawn_s = 0.0

    @property
    def terminated(self) -> bool:
        return self._matcher.terminated

    def masks(self, drafts: Sequence[int], out: torch.Tensor) -> None:
        """As ``Matcher.masks``, once a step. Raises GrammarTooDear, before any more time is spent."""
        if self._overdrawn_s > STEPS * self._allowance_s:
            raise GrammarTooDear(
                f"its masks have taken {1000 * self._overdrawn_s:.0f} ms more than the {1000 * self._allowance_s:g} ms of each step "
                "(--grammar-step-budget): it can read the same text in too many ways; give each rule one way to be read"
            )
        self._overdrawn_s = max(0.0, self._overdrawn_s - self._allowance_s)
        begun = self._clock()
        try:
            self._matcher.masks(drafts, out)
        finally:
            self._overdrawn_s += self._clock() - begun

    def advance(self, tokens: Sequence[int]) -> int:
        begun = self._clock()
        try:
            return self._matcher.advance(tokens)
        finally:
            self._overdrawn_s += self._clock() - begun
