"""A time as a log gives it: in UTC, with what of it had to be assumed.

Logs leave out the zone, the year and sometimes the date. Seconds are still told apart by such times, so they are kept,
but only times that lack the same parts may be compared, and whatever is shown to a person says what was assumed.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

_DAY_S = 86400.0


@dataclass(frozen=True)
class Moment:
    """``unix_s`` in UTC. ``zone``, ``year`` and ``date`` are false where the text had none: then UTC, 2000 (a leap
    year) and the first of January stand in for them."""

    unix_s: float
    zone: bool = True
    year: bool = True
    date: bool = True

    def since(self, earlier: Moment) -> float | None:
        """Seconds from ``earlier`` to this; None when the two lack different parts. Where no date (or no year) is
        known, a step back of more than half a day (half a year) is a midnight (a new year) that lies between."""
        if (self.zone, self.year, self.date) != (earlier.zone, earlier.year, earlier.date):
            return None
        seconds = self.unix_s - earlier.unix_s
        if not self.date and seconds < -_DAY_S / 2:
            return seconds + _DAY_S
        if self.date and not self.year and seconds < -183 * _DAY_S:
            return seconds + 366 * _DAY_S
        return seconds

    def __str__(self) -> str:
        at = dt.datetime.fromtimestamp(self.unix_s, dt.UTC)
        text = at.strftime("%H:%M:%S") if not self.date else at.strftime("%m-%d %H:%M:%S") if not self.year else at.strftime("%F %T")
        gaps = [word for word, known in (("zone assumed", self.zone), ("year not given", self.year or not self.date),
                                         ("date not given", self.date)) if not known]  # fmt: skip
        return f"{text} UTC" + (f" ({', '.join(gaps)})" if gaps else "")
