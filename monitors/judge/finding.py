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


def many(count: float, noun: str, one: str = "", more: str = "") -> str:
    """A count with its noun and its verb: ``many(1, "request", "waits", "wait")`` is ``1 request waits``."""
    return f"{count:.0f} {noun}{'' if count == 1 else 's'} {one if count == 1 else more}".rstrip()


def all_of(count: int, noun: str, one: str, more: str) -> str:
    """``all 3 ranks wait``, and ``the only rank waits``."""
    return f"the only {noun} {one}" if count == 1 else f"all {count} {noun}{'es' if noun.endswith('s') else 's'} {more}"
