"""Numbers of a command line that are none. ``float`` takes "nan" and "inf", no comparison refuses the first of them, and a
deadline that is one of them never comes."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NONE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_TEXTS = frozenset({"--reason"})


def problem(args: Sequence[str]) -> str:
    """What is wrong with the value of an option; empty when each may be a number."""
    for before, word in zip(("", *args), args, strict=False):
        option, equals, value = word.partition("=")
        if not equals:
            option, value = before, word
        if option.startswith("--") and option not in _TEXTS and _NONE.fullmatch(value):
            return f"{option}: {value} is no number that can be waited for or counted; give one such as 60"
    return ""
