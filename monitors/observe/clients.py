"""What clients saw: a proxy's log, a smoke test's table. They hold the requests that a server may have forgotten."""

from __future__ import annotations

import csv
import re

from monitors.judge.scene import Cite, Client
from monitors.observe.envelope import unwrap

_TIMEOUT = re.compile(
    r"(?i)\btime[ds]?[ -]?out\b|\bdeadline exceeded\b|\b50[34]\b|gateway time-?out|no (?:answer|response)|\bhangs?\b|\bhung\b"
)
_FALLBACK = re.compile(
    r"(?i)(?:fall(?:ing|s|en)?[ _-]?back|fail(?:ing|ed)?[ _-]?over|re-?rout(?:ed|ing)|served[ _-]by|using)\b.{0,80}"
    r"\b(?:hosted|cloud|openai|anthropic|openrouter|azure|bedrock|vertex|gemini|deepseek|together|fireworks|external)\b"
)
_OK = re.compile(r"(?i)\b200\b(?: OK)?|\bok\b|\bpassed\b|\bsuccess\b")
_COUNTS = re.compile(r"(?i)before_(?:hang|stall|timeout)|^(?:hung|timeouts?|failed|errors?)$")
_MOST = 10_000


def from_text(text: str, artefact: str) -> list[Client]:
    """Lines that say how requests fared. A table with a column that counts failures is read by that column; lines
    that say neither are passed over."""
    table = _table(text, artefact)
    if table is not None:
        return table
    found: list[Client] = []
    for number, line in enumerate(text.splitlines()[:_MOST], 1):
        for opened in unwrap(line)[:1]:
            what = next(
                (kind for kind, pattern in (("fallback", _FALLBACK), ("timeout", _TIMEOUT), ("ok", _OK)) if pattern.search(opened.text)), ""
            )
            if what:
                found.append(Client(what, opened.text.strip()[:300], Cite(artefact, number), opened.moment))
    return found


def _table(text: str, artefact: str) -> list[Client] | None:
    lines = text.splitlines()
    header = [cell.strip() for cell in lines[0].split(",")] if lines and "," in lines[0] else []
    columns = [name for name in header if _COUNTS.search(name)]
    if not columns:
        return None
    found: list[Client] = []
    for number, row in enumerate(csv.reader(lines[1:_MOST]), 2):
        cells = dict(zip(header, (cell.strip() for cell in row), strict=False))
        if any(cells.get(name) not in (None, "", "0", "false") for name in columns):
            said = ", ".join(f"{name} {cells[name]}" for name in header if cells.get(name))
            found.append(Client("timeout", said[:300], Cite(artefact, number)))
    return found
