"""Is work held? From counters before gauges, since a gauge keeps its last value through a hang and may be stuck.

Pure: a memory and one more page of metrics, or the last batch line where there are no metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_LIES_AFTER = 3  # pages on which tokens grew while the gauges said that nothing runs
_OPEN_WINDOW = 300  # pages over which the fewest open requests are taken as those that were lost count of


@dataclass(frozen=True)
class Page:
    """What one scrape says; None where the page has no such name. ``gauges``: running and waiting. ``tokens``: the
    counters that work moves. ``accepted`` and ``answered``: requests taken in and done with. ``load``: requests that the
    API process has in hand, by its own count."""

    gauges: float | None = None
    tokens: float | None = None
    accepted: float | None = None
    answered: float | None = None
    load: float = 0.0


@dataclass(frozen=True)
class Holding:
    """What is kept between two pages. Begin with ``Holding()``."""

    last: Page = Page()
    zero_while_moving: int = 0
    lies: bool = False
    opened: tuple[float, ...] = ()

    def take(self, page: Page) -> Holding:
        """After one more page."""
        grew = page.tokens is not None and self.last.tokens is not None and page.tokens > self.last.tokens
        opened = self.opened
        if page.accepted is not None and page.answered is not None:
            open_now = page.accepted - page.answered
            # Counters that start again begin a new count.
            opened = (*(opened if self.last.accepted is None or page.accepted >= self.last.accepted else ()), open_now)[-_OPEN_WINDOW:]
        if page.gauges:
            zeros, lies = 0, False
        else:
            # Short requests come and go between two pages: where it is told what is open, it must be open now.
            held = page.load > 0 or not opened or opened[-1] > min(opened)
            zeros = self.zero_while_moving + 1 if grew and held and page.gauges == 0 else self.zero_while_moving
            lies = self.lies or zeros >= _LIES_AFTER
        return replace(self, last=page, zero_while_moving=zeros, lies=lies, opened=opened)

    def held(self, *, line: float | None = None) -> float | None:
        """Requests held, None when nothing trustworthy says so. ``line``: by the last batch line."""
        said: list[float] = []
        if self.opened:
            said.append(self.opened[-1] - min(self.opened))
        if self.last.gauges is not None and not self.lies:
            said.append(self.last.gauges)
        if self.last.load > 0:  # 0 may mean that it is not counted
            said.append(self.last.load)
        if said:
            return max(said)
        return line

    @property
    def complaint(self) -> str:
        """What is wrong with the gauges, for a person; empty when nothing is."""
        return "the gauges of running and waiting requests say 0 while tokens are generated: they are not believed" if self.lies else ""
