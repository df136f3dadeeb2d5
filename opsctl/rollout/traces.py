"""Python tracebacks in the lines of a log: whole ones, even when several processes write at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opsctl.service.manager import Line

_HEAD = "Traceback (most recent call last):"
_LAST = re.compile(r"^(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Group|Timeout|Expired|Fault)\w*)\b(?::|$)")
_LONGEST = 400


def tracebacks(lines: Sequence[Line]) -> tuple[str, ...]:
    """Each traceback with its last line. Lines of other processes between its own are left out where the log names
    processes; a head that no exception follows is given as far as it goes."""
    found = []
    for at, line in enumerate(lines):
        head = line.text.find(_HEAD)
        if head < 0:
            continue
        prefix, taken = line.text[:head], [line.text]
        for later in lines[at + 1 : at + 1 + _LONGEST]:
            if line.pid and later.pid != line.pid:
                continue
            text = later.text.removeprefix(prefix) if prefix else later.text
            if later.manager or _HEAD in text:
                break
            taken.append(later.text)
            if text and not text[0].isspace():
                break
        found.append("\n".join(taken))
    return tuple(found)


def exception(traceback: str) -> str:
    """The class of a traceback's exception; empty when it was cut off."""
    last = traceback.splitlines()[-1]
    match = _LAST.search(last.strip()) or re.match(r"^(?P<name>[A-Za-z_][\w.]*):", last.strip())
    return match["name"] if match else ""
