"""Read the times that log lines carry, in the forms that engines, containers, journals and the kernel write them.

Pure. A time without a zone is taken as UTC and says so; one without a year or a date says that as well.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re

from monitors.judge.moment import Moment

_CLOCK = r"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,:](?P<frac>\d{1,9}))?"
_ZONE = r"(?: ?(?P<zone>Z|UTC|[+-]\d\d:?\d\d)(?!\d))?"
_MONTHS = {
    name: number for number, name in enumerate(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1)
}
_FORMS = tuple(
    re.compile(text)
    for text in (
        # 2026-01-01T05:41:16.123Z, 2026-01-01 05:41:16,123, 2026/01/01 05:41:16
        r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)(?:T| - | )" + _CLOCK + _ZONE,
        # 04/28/2025-09:56:44
        r"(?P<mo>\d\d)/(?P<d>\d\d)/(?P<y>\d{4})-" + _CLOCK,
        # Wed Jul 31 23:14:18 2024 (dmesg -T), Jan  1 05:41:16 (syslog)
        r"(?P<month>" + "|".join(_MONTHS) + r") (?P<d>[ \d]\d) " + _CLOCK + r"(?: (?P<y>\d{4})\b)?",
        # E1001 16:06:04.5 (glog), E626 05:14:36.3 (PyTorch: no leading zero)
        r"[IWEF](?P<mo>\d{1,2}?)(?P<d>\d\d) " + _CLOCK,
        # 04-28 22:54:32
        r"(?<![\d-])(?P<mo>\d\d)-(?P<d>\d\d) " + _CLOCK,
        # 16:43:29
        r"(?<![\d:])" + _CLOCK + r"(?![\d:])",
    )
)
_REACH = 96  # a time stands at the head of a line


def find(text: str) -> Moment | None:
    """The first time in the head of a line."""
    head = text[:_REACH]
    for form in _FORMS:
        match = form.search(head)
        if match:
            return _moment(match.groupdict())
    return None


def from_epoch(value: object) -> Moment | None:
    """A number (or its text) of seconds, milli-, micro- or nanoseconds since 1970."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)  # type: ignore[arg-type]
        for scale in (1.0, 1e3, 1e6, 1e9):
            if 5e8 < number / scale < 1e10:
                return Moment(number / scale)
    return None


def _moment(found: dict[str, str | None]) -> Moment | None:
    month = _MONTHS.get(found.get("month") or "") or int(found.get("mo") or 1)
    year, day, zone = found.get("y"), found.get("d"), found.get("zone")
    try:
        at = dt.datetime(int(year or 2000), month, int(day or 1), int(found["h"] or 0), int(found["mi"] or 0), int(found["s"] or 0),
                         tzinfo=dt.UTC)  # fmt: skip
    except ValueError:
        return None
    seconds = at.timestamp() + float(f"0.{found.get('frac') or 0}")
    if zone and zone not in ("Z", "UTC"):
        sign = -1 if zone[0] == "-" else 1
        seconds -= sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return Moment(seconds, zone=bool(zone), year=bool(year), date=day is not None)
