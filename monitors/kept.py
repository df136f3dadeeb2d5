"""What the monitor keeps on disk over its own restarts: the book of incidents and what each GPU draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monitors.judge.incidents import Book
from monitors.judge.power import Bands


def write(file: Path, document: Any) -> str:
    """Replace a file as a whole; the reason when that fails (a full disk), else nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".part")
        scratch.write_text(json.dumps(document))
        scratch.replace(file)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return ""


def book(file: Path) -> Book:
    """An empty one where there is none yet, or it was cut by a full disk: at worst one page is sent twice."""
    try:
        return Book.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return Book()


def bands(file: Path) -> Bands:
    """None learned where there is no file, or it was cut: they are learned within minutes."""
    try:
        return Bands.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Bands()
