"""What a drill is worth: when each moment came, and what that says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from opsctl.playbooks.schema import Drill, Targets

MOMENTS = ("injected", "detected", "captured", "mitigated", "recovered")
_LATE, _FALSE_MOVE, _HINT, _EDITED = 10, 10, 5, 20


class Moments(msgspec.Struct):
    """Seconds after the injection, on one monotonic clock. None: it did not come.

    ``detected``: the first page. ``captured``: the bundle is whole on disk. ``mitigated``: the first completion after the
    fault was seen to hold, by any path. ``recovered``: the beginning of a time in which all was well throughout.
    """

    injected: float = 0.0
    detected: float | None = None
    captured: float | None = None
    mitigated: float | None = None
    recovered: float | None = None


class Taken(msgspec.Struct, frozen=True):
    """A runbook's step against a live fault. ``outcome`` is that of the runbook's record: passed, failed, skipped, held,
    interrupted or left; ``why`` says more where it is not passed."""

    runbook: str
    step: str
    outcome: str
    seconds: float = 0.0
    exit_code: int | None = None
    why: str = ""


class Score(msgspec.Struct):
    """``points`` of 100; ``passed`` needs more than points: what must come came, and the verdict was right.

    ``verdicts`` are the monitor's, each once, in the order in which they came; ``triage`` what ``opsctl triage`` told, where
    it was asked; ``recaptured`` what the runbook's captures said. ``fidelity``: the share of the runbook's steps that ran
    unedited. ``false_moves``: what was done or said that should not have been: a page for nothing, a step that failed, a
    restart before the evidence was taken.
    """

    drill: str
    mode: str
    began_utc: str
    moments: Moments
    verdicts: list[str] = []
    expected: Sequence[str] = ()
    triage: list[str] = []
    recaptured: list[str] = []
    paged: int = 0
    fidelity: float | None = None
    steps: list[Taken] = []
    false_moves: list[str] = []
    hints: int = 0
    problems: list[str] = []
    points: int = 0
    passed: bool = False
    folder: str = ""

    def judge(self, drill: Drill) -> None:
        """Fill in points and outcome. An injected fault that nobody was paged for is a failure, however soon it was over."""
        wrong = list(self.problems)
        if drill.pages and self.moments.detected is None:
            wrong.append("nobody was paged")
        if not drill.pages and self.paged:
            wrong.append("somebody was paged for what pages nobody")
        first = self.verdicts[0] if self.verdicts else ""
        if drill.verdicts and first not in drill.verdicts:
            wrong.append(f"the verdict was {first or 'none'}, not {' or '.join(drill.verdicts)}")
        wrong += [f"the monitor did not say {one} besides" for one in drill.also if one not in self.verdicts]
        if drill.told_apart:
            wrong += [f"triage did not tell {one}" for one in {*self.verdicts[:1], *drill.also} if one not in self.triage]
        if drill.recaptured and drill.recaptured not in self.recaptured:
            wrong.append(f"no capture of the runbook said {drill.recaptured}")
        if drill.targets.captured_s is not None and self.moments.captured is None:
            wrong.append("nothing was captured")
        for name in ("mitigated", "recovered"):
            if getattr(drill.targets, f"{name}_s") is not None and getattr(self.moments, name) is None:
                wrong.append(f"never {name}")
        late = overdue(self.moments, drill.targets)
        points = 100 - _LATE * len(late) - _FALSE_MOVE * len(self.false_moves) - _HINT * self.hints
        points -= round(_EDITED * (1 - self.fidelity)) if self.fidelity is not None else 0
        self.problems, self.passed = wrong, not wrong
        self.points = max(0, points) if not wrong else 0


def overdue(moments: Moments, targets: Targets) -> list[str]:
    """The moments that came after their target."""
    late = []
    for name in MOMENTS[1:]:
        target, at = getattr(targets, f"{name}_s"), getattr(moments, name)
        if target is not None and at is not None and at > target:
            late.append(name)
    return late


def row(score: Score) -> list[str]:
    """One line of the scoreboard."""
    at = [_seconds(getattr(score.moments, name)) for name in MOMENTS[1:]]
    fidelity = "-" if score.fidelity is None else f"{score.fidelity:.0%}"
    return [score.drill, "passed" if score.passed else "FAILED", str(score.points), *at, " ".join(score.verdicts) or "-", fidelity,
            str(len(score.false_moves)), "; ".join(score.problems)]  # fmt: skip


HEAD = ["drill", "outcome", "points", "detected", "captured", "mitigated", "recovered", "verdict", "fidelity", "false moves", ""]


def table(scores: Sequence[Score]) -> str:
    """The scoreboard, and below it which steps of which runbook were run, and how each went."""
    rows = [HEAD, *(row(score) for score in scores)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEAD))]
    board = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows]
    wide = max((len(score.drill) for score in scores), default=0)
    ran = [f"{score.drill.ljust(wide)}  {book}: {text}" for score in scores for book, text in steps(score).items()]
    return "\n".join([*board, *(["", "steps of runbooks against the live fault:", *ran] if ran else [])])


def steps(score: Score) -> dict[str, str]:
    """Of each runbook that was gone through, its steps in a line."""
    found: dict[str, list[str]] = {}
    for one in score.steps:
        code = "" if one.exit_code is None else f" {one.exit_code}"
        how = f"{one.seconds:.1f} s" if one.outcome == "passed" else f"{one.outcome}{code}"
        found.setdefault(one.runbook, []).append(f"{one.step} ({how})")
    return {book: ", ".join(texts) for book, texts in found.items()}


def _seconds(value: Any) -> str:
    return "-" if value is None else f"{value:.1f} s"
