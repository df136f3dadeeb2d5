"""The verdict: a class, how sure, the evidence for and against, what is missing, and who is suspected."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monitors.judge.scene import Cite, Missing


class Class(enum.StrEnum):
    """One enum for cases, verdicts, runbooks and reports. The names are part of the contract."""

    hang_grammar_barrier = "hang_grammar_barrier"
    hang_symmetric_spin = "hang_symmetric_spin"
    hang_asymmetric = "hang_asymmetric"
    hang_tp_desync = "hang_tp_desync"
    hang_host_callback = "hang_host_callback"
    hang_kv_transfer = "hang_kv_transfer"
    hang_control_plane = "hang_control_plane"
    hang_cpu_bound = "hang_cpu_bound"
    hang_stopped = "hang_stopped"
    hang_unknown = "hang_unknown"
    slow_not_hung = "slow_not_hung"
    loading_not_hung = "loading_not_hung"
    idle_not_hung = "idle_not_hung"
    healthy = "healthy"
    crash = "crash"
    crash_loop = "crash_loop"
    oom = "oom"
    health_lies = "health_lies"
    parser_leak = "parser_leak"
    hosted_fallback = "hosted_fallback"

    @property
    def is_hang(self) -> bool:
        return self.value.startswith("hang_")

    @property
    def is_dead(self) -> bool:
        """Whether nothing is served any more."""
        return self.is_hang or self in (Class.crash, Class.crash_loop, Class.oom)

    @property
    def is_alarm(self) -> bool:
        """Whether somebody is paged: for a wedge, a crash and corruption, never for a silence that ends by itself."""
        return self.is_dead or self in (Class.health_lies, Class.parser_leak, Class.hosted_fallback)


@dataclass(frozen=True)
class Evidence:
    """One statement. ``supports`` is false for what speaks against the verdict."""

    text: str
    cite: Cite
    supports: bool = True

    def to_json(self) -> dict[str, Any]:
        return {"for": self.supports, "text": self.text, "artefact": self.cite.artefact, "line": self.cite.line or None}


@dataclass(frozen=True)
class Verdict:
    """``confidence`` in 0..1. A confidence below 0.5 says that another class is nearly as likely."""

    verdict: Class
    confidence: float
    evidence: tuple[Evidence, ...] = ()
    missing: tuple[Missing, ...] = ()
    suspects: tuple[str, ...] = ()
    blind: bool = False  # it rests on devices, counters and clients alone; decides when it pages, and is not written down

    @property
    def runbook(self) -> str:
        """Empty where there is nothing to do."""
        return "" if self.verdict in (Class.healthy, Class.idle_not_hung) else f"runbooks/{self.verdict.value}.md"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "confidence": round(self.confidence, 2),
            "evidence": [item.to_json() for item in self.evidence],
            "missing": [{"what": gap.what, "reason": gap.reason} for gap in self.missing],
            "suspects": list(self.suspects),
            "runbook": self.runbook,
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Verdict:
        """Read back what ``to_json`` wrote."""
        return Verdict(
            Class(raw["verdict"]),
            float(raw["confidence"]),
            tuple(Evidence(e["text"], Cite(e["artefact"], e["line"] or 0), e["for"]) for e in raw["evidence"]),
            tuple(Missing(m["what"], m["reason"]) for m in raw["missing"]),
            tuple(raw["suspects"]),
        )
