"""How long nobody was served, from a pulse's lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def beats(text: str, since: float = 0.0) -> list[tuple[float, bool]]:
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and float(words[0]) >= since:
            found.append((float(words[0]), words[1] == "1"))
    return found


def without_service(found: Iterable[tuple[float, bool]]) -> float:
    """Seconds, all gaps together, each from the first question that was not answered to the next that was."""
    total, gone = 0.0, None
    last = None
    for at, good in found:
        if not good and gone is None:
            gone = at
        elif good and gone is not None:
            total += at - gone
            gone = None
        last = at
    if gone is not None and last is not None:
        total += last - gone
    return round(total, 2)
