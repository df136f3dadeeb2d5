"""Take secrets and people's words out of text before it is kept, with a ledger of what was taken out and by which rule.

The numbers of a batch line are never touched: ``#token: 119000`` is no token in this sense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """``pattern``'s group ``secret`` is replaced, or the whole match where there is no such group."""

    name: str
    pattern: re.Pattern[str]


_LONGEST_LINE = 16384
_QUOTED = r"""(?P<secret>"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)"""
RULES: tuple[Rule, ...] = (
    Rule("bearer", re.compile(r"(?i)\bbearer\s+(?P<secret>[A-Za-z0-9._~+/=-]{6,})")),
    Rule(
        "api-key", re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{12,}|\bhf_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}")
    ),
    Rule(
        "named-secret",
        re.compile(
            r"(?i)(?<![#\w-])(?:--)?(?:api[_-]?key|admin[_-]?key|access[_-]?token|auth[_-]?token|hf[_-]?token|secret|password|passwd)"
            r"[\"']?\s*(?:[=:]\s*|\s)[\"']?(?P<secret>[^\s\"',;&)}]{4,})"
        ),
    ),
    Rule("url-password", re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:(?P<secret>[^@\s/]+)@")),
    Rule("e-mail", re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b")),
    Rule("prompt", re.compile(r"""(?:["']?\b(?:prompt|content|text|input_text|output_text|messages)["']?\s*[=:]\s*)""" + _QUOTED)),
    Rule(
        "token-ids",
        re.compile(r"\b(?:input_ids|output_ids|prompt_token_ids|token_ids)[\"']?\s*[=:]\s*(?P<secret>(?:array\('\w',\s*)?\[[^\]]*\]?\)?)"),
    ),
)


@dataclass(frozen=True)
class Redaction:
    """One entry of the ledger. ``size`` is how many characters were taken out; what they were is not kept."""

    artefact: str
    line: int
    rule: str
    size: int

    def to_json(self) -> dict[str, Any]:
        return {"artefact": self.artefact, "line": self.line, "rule": self.rule, "size": self.size}


def redact(text: str, artefact: str) -> tuple[str, list[Redaction]]:
    """The text without what the rules find, and the ledger. Line numbers stay as they are. Of a line of more than
    16 KiB the rest is taken out as a whole: it is data, and no rule could be sure of it."""
    ledger: list[Redaction] = []
    kept: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            ledger.append(Redaction(artefact, number, "too-long", len(line) - _LONGEST_LINE))
            line = line[:_LONGEST_LINE] + "[redacted:too-long]"
        for rule in RULES:
            line = _apply(rule, line, artefact, number, ledger)
        kept.append(line)
    return "\n".join(kept), ledger


def _apply(rule: Rule, line: str, artefact: str, number: int, ledger: list[Redaction]) -> str:
    grouped = "secret" in rule.pattern.groupindex
    pieces: list[str] = []
    at = 0
    for match in rule.pattern.finditer(line):
        start, end = match.span("secret") if grouped else match.span()
        if end == start or "[redacted:" in line[start:end]:
            continue
        pieces += [line[at:start], f"[redacted:{rule.name}]"]
        ledger.append(Redaction(artefact, number, rule.name, end - start))
        at = end
    return "".join(pieces) + line[at:]
