"""Markup in answers, by the engine's own counter of it: how often, beside the answers that it gave? Pure.

One broken tool call is a model's slip. Many of them, in a good part of all answers, are a parser that does not fit the
model or has lost its place.
"""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW_S = 600.0
_LEAST = 5.0
_SHARE = 0.2


@dataclass(frozen=True)
class Markup:
    """What is kept between pages of metrics. Begin with ``Markup()``. ``seen``: when, leaked and answered so far."""

    seen: tuple[tuple[float, float, float], ...] = ()

    def take(self, now_s: float, leaked: float | None, answered: float | None) -> Markup:
        """After one more page. A server that has started again counts from 0, and is counted anew."""
        if leaked is None or answered is None:
            return self
        before = self.seen if not self.seen or (leaked >= self.seen[-1][1] and answered >= self.seen[-1][2]) else ()
        if before and before[-1][1:] == (leaked, answered):
            return self
        # The newest of those that have left the window stays: from it on is counted.
        outside = [one for one in before if now_s - one[0] > _WINDOW_S][-1:]
        return Markup((*outside, *(one for one in before if now_s - one[0] <= _WINDOW_S), (now_s, leaked, answered)))

    def told(self) -> str:
        """What leaks, in words; empty when nothing does."""
        if not self.seen:
            return ""
        (since_s, leaked, answered), (now_s, leaked_now, answered_now) = self.seen[0], self.seen[-1]
        bad, all_ = leaked_now - leaked, answered_now - answered
        if bad < _LEAST or bad < _SHARE * all_:
            return ""
        return f"by the engine's own count {bad:.0f} of {all_:.0f} answers in {now_s - since_s:.0f} s held markup that was not parsed"
