"""Is there markup of tool calls, or a model's own control tokens, in a text that a client was to see? A pure scanner.

Bars and blanks are normalised first, since the same marker is seen in several spellings; a stream's chunks are joined
before (``observe/answers.py``), so a marker that is cut between two is one. What a text shows as code (fences,
backquotes) is quoted, not leaked: an answer may be about such markup.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Fullwidth, double, divides, box drawing, dental click, broken bar: all of them stand for the bar of a marker.
_BARS = str.maketrans(
    dict.fromkeys("\uff5c\u2016\u2223\u2502\u2503\u2758\u23d0\uffe8\u00a6\u01c0", "|")
    | {"\u2581": "_", "\uff1c": "<", "\uff1e": ">", "\u3008": "<", "\u3009": ">"}
)
_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]{1,400}`", re.DOTALL)
_MARKERS = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"</?\s*\|+\s*DSML\b\s*\|*\s*(?P<m>[\w ]{0,40})", "DSML tool-call markup"),
        (r"</?\s*\|+\s*tool_{0,2}\s?(?:calls?|outputs?|sep)\w*\s*\|*>?", "tool-call control tokens"),
        (r"<\s*\|+\s*/?[A-Za-z_][A-Za-z0-9_ .-]{0,40}\s*\|+\s*>", "a model's control token"),
        (r"</?(?:[a-z]{1,20}:)?(?:tool_calls?|function_calls|function_results|tool_result|toolcall)\s*>", "tool-call markup"),
        (r"<(?:function|parameter)=[\w.-]{1,80}>", "tool-call markup"),
        (r"</?(?:[a-z]{1,20}:)?(?:invoke|parameter)(?: name=\"[^\"\n]{0,80}\")(?: string=\"\w+\")?\s*>", "tool-call markup"),
        (r"</?(?:arg_key|arg_value)>", "tool-call markup"),
        (r"\[(?:TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|/?INST)\]", "a model's control token"),
    )
)
_THINK = re.compile(r"\A\s*</think>|</think>\s*\S|\A\s*<think>")


@dataclass(frozen=True)
class Leak:
    """``marker`` as it stands in the text, ``what`` in words, ``count`` of all such markers, ``at`` its character."""

    marker: str
    what: str
    count: int
    at: int


def scan(text: str, channel: str = "content") -> Leak | None:
    """The first marker in a text of a channel (``content``, ``reasoning``, ``arguments``); None where it is clean."""
    plain = text.translate(_BARS)
    shown = _QUOTED.sub(lambda match: " " * len(match[0]), plain) if channel != "arguments" else plain
    hits = [(match.start(), match.end(), what) for pattern, what in _MARKERS for match in pattern.finditer(shown)]
    if channel == "content":
        hits += [(match.start(), match.end(), "reasoning markup") for match in _THINK.finditer(shown)]
    if not hits:
        return None
    start, end, what = min(hits)
    return Leak(text[start:end].strip(), what, len({hit[0] for hit in hits}), start)


def doubled(text: str) -> bool:
    """Whether the text is one and the same piece twice, which a stream parser that flushes what it held back makes."""
    plain = text.strip()
    half = len(plain) // 2
    return half >= 12 and len(plain) % 2 == 0 and plain[:half] == plain[half:]


def degenerate(text: str) -> str:
    """One short piece again and again (``!!!!``), as broken numerics give it; empty where the text is not so."""
    found = re.search(r"(?P<p>\S.{0,7}?)(?P=p){31,}\s*\Z", text[-4096:], re.DOTALL)
    return found["p"] if found and set(found["p"]) - set("-=_*#. \n|") else ""
