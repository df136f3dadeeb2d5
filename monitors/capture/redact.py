"""Take secrets and people's words out of text before it is kept, with a ledger of what was taken out and by which rule.

The numbers of a batch line are never touched: ``#token: 119000`` is no token in this sense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Rule:
    """``pattern``'s group ``secret`` is replaced, or the whole match where there is no such group. ``group`` says what
    of a ``Policy`` the rule hangs on; ``only`` names the one artefact that it is for."""

    name: str
    pattern: re.Pattern[str]
    group: Literal["secret", "words", "address"] = "secret"
    only: str = ""


@dataclass(frozen=True)
class Policy:
    """What is taken out. Secrets always are. People's words (prompts, answers, token ids) are unless ``include_prompts``
    was asked for; IP addresses only where ``addresses`` is set, since a ticket often needs them."""

    include_prompts: bool = False
    addresses: bool = False

    def applies(self, rule: Rule, artefact: str) -> bool:
        wanted = {"secret": True, "words": not self.include_prompts, "address": self.addresses}[rule.group]
        return wanted and (not rule.only or rule.only == artefact)

    def to_json(self) -> dict[str, str]:
        return {"secrets": "taken out", "prompts": "kept" if self.include_prompts else "taken out",
                "ip_addresses": "taken out" if self.addresses else "kept"}  # fmt: skip


_LONGEST_LINE = 16384
_QUOTED = r"""(?P<secret>"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)"""
RULES: tuple[Rule, ...] = (
    Rule("bearer", re.compile(r"(?i)\bbearer\s+(?P<secret>[A-Za-z0-9._~+/=-]{6,})")),
    Rule(
        "api-key",
        re.compile(
            r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{12,}|\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}"
            r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\bnvapi-[\w-]{20,}|\bnpm_[A-Za-z0-9]{30,}"
        ),
    ),
    Rule(
        "named-secret",
        re.compile(
            r"(?i)(?<![#\w-])(?:--)?(?:api[_-]?key|admin[_-]?key|access[_-]?token|auth[_-]?token|hf[_-]?token|secret|password|passwd)"
            r"[\"']?\s*(?:[=:]\s*|\s)[\"']?(?P<secret>[^\s\"',;&)}]{4,})"
        ),
    ),
    Rule("jwt", re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*")),
    Rule("basic-auth", re.compile(r"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|token|digest)\s+(?P<secret>[^\s\"',]{4,})")),
    Rule("cookie", re.compile(r"(?i)\b(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?(?P<secret>[^\"'\r\n]{4,})")),
    Rule("url-token", re.compile(r"(?i)[?&](?:key|token|sig|signature|access_token|api_key|x-amz-[a-z-]+)=(?P<secret>[^&\s\"']{4,})")),
    Rule("private-key", re.compile(r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----.*)")),
    # Whoever is paged is named by a URL that is itself the secret: slack://TOKEN, https://hooks.example/TOKEN.
    Rule("page-url", re.compile(r"^(?!\s*(?:api|via|ssh)\s*=).*?[\"'][a-z][a-z0-9+.-]*://(?P<secret>[^\"']+)"), only="fleet.toml"),
    Rule("url-password", re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:(?P<secret>[^@\s/]+)@")),
    Rule("e-mail", re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b")),
    Rule(
        "prompt",
        re.compile(
            r"""(?:["']?\b(?:prompt|content|text|input_text|output_text|messages|completion|reasoning_content)["']?\s*[=:]\s*)""" + _QUOTED
        ),
        "words",
    ),
    Rule(
        "token-ids",
        re.compile(r"\b(?:input_ids|output_ids|prompt_token_ids|token_ids)[\"']?\s*[=:]\s*(?P<secret>(?:array\('\w',\s*)?\[[^\]]*\]?\)?)"),
        "words",
    ),
    Rule("ip-address", re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"), "address"),
    Rule(
        "ip-address",
        re.compile(r"(?i)(?<![\w:.])(?=[0-9a-f:]*::|(?:[0-9a-f]+:){7})(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?![\w:.])"),
        "address",
    ),
)
_KEY_BEGINS, _KEY_ENDS = "-----BEGIN ", "-----END "


@dataclass(frozen=True)
class Redaction:
    """One entry of the ledger. ``size`` is how many characters were taken out; what they were is not kept."""

    artefact: str
    line: int
    rule: str
    size: int

    def to_json(self) -> dict[str, Any]:
        return {"artefact": self.artefact, "line": self.line, "rule": self.rule, "size": self.size}


def redact(text: str, artefact: str, policy: Policy = Policy()) -> tuple[str, list[Redaction]]:
    """The text without what the rules find, and the ledger. Line numbers stay as they are. Of a line of more than
    16 KiB the rest is taken out as a whole: it is data, and no rule could be sure of it."""
    ledger: list[Redaction] = []
    kept: list[str] = []
    rules = [rule for rule in RULES if policy.applies(rule, artefact)]
    in_key = False
    for number, line in enumerate(text.split("\n"), 1):
        if in_key:
            in_key = _KEY_ENDS not in line
            ledger.append(Redaction(artefact, number, "private-key", len(line)))
            kept.append("[redacted:private-key]")
            continue
        in_key = _KEY_BEGINS in line and "PRIVATE KEY-----" in line and _KEY_ENDS not in line
        if len(line) > _LONGEST_LINE:
            ledger.append(Redaction(artefact, number, "too-long", len(line) - _LONGEST_LINE))
            line = line[:_LONGEST_LINE] + "[redacted:too-long]"
        for rule in rules:
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
