"""A finding: one fact about a scene, where it was read, and which ranks it is about."""

from __future__ import annotations

from dataclasses import dataclass

from monitors.judge.ranks import RankView
from monitors.judge.scene import Cite


@dataclass(frozen=True)
class Finding:
    text: str
    cite: Cite
    ranks: tuple[RankView, ...] = ()


Findings = dict[str, Finding]
