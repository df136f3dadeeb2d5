"""A text that a person wrote, read whole: UTF-8, and never more of it than such a text can be."""

from __future__ import annotations

import errno
from pathlib import Path

MOST_BYTES = 1 << 20


def read(path: Path) -> str:
    """Raises OSError, also for a file of more than ``MOST_BYTES`` (a device may have no end), and UnicodeDecodeError."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES} bytes", str(path))
    return data.decode("utf-8")
