"""Markers in a stream: how much of the end must wait, because it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of a marker."""
    longest = max((len(marker) for marker in markers), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        suffix = text[-size:]
        if any(len(marker) > size and marker.startswith(suffix) for marker in markers):
            return size
    return 0


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest marker begins in ``text``, and which it is. Markers must not begin with one another."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else None
