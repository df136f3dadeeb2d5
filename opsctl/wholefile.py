"""A file that is there whole or not at all, whatever ends the writing of it."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Replaces the file, and makes its folder where there is none. Raises OSError: then what was there is there still."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")  # two commands may write the same file at once
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException as error:
        scratch.unlink(missing_ok=True)  # half a file would keep the room that others need
        if isinstance(error, OSError) and not error.filename:
            raise type(error)(error.errno, error.strerror, str(path)) from error  # a full disk does not say of which file
        raise
