"""The API key in a file. What is no key is told without it: a client that is given one would quote it in its error."""

from __future__ import annotations

import errno
from pathlib import Path

_LONGEST = 8192


def read(path: str | Path) -> str:
    """The key; empty for an empty file. Raises OSError, also for more than one line of printable ASCII."""
    with Path(path).open("rb") as file:
        data = file.read(_LONGEST + 1)
    key = data.decode("utf-8", errors="replace").strip()
    if len(data) > _LONGEST or not (key.isascii() and key.isprintable()):
        raise OSError(errno.EINVAL, "holds no key; write it there alone, one line of printable ASCII", str(path))
    return key
