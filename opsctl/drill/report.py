"""The scoreboard as a page of Markdown, with what each runbook's steps did against a live fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from opsctl.drill.score import MOMENTS, Score, Taken
from opsctl.runbooks.document import Runbook

_MEANS = """Seconds after the injection, on one monotonic clock: the first page, the whole bundle on disk, the first good answer
after all that was wrong had been seen, the beginning of the time in which all was well. Where there is no verdict, a
rollout was injected that goes back by itself, or it is a day that was replayed: that is as good as its steps."""
_STEPS = """Seconds of a step that went as it should, otherwise its outcome. What is not run is for another cause of the same
class, for another service manager, or for what had ended by itself in the drill."""
_HEAD = ("drill", "", "points", *MOMENTS[1:], "verdicts", "triage", "fidelity", "")


def latest(scores: Sequence[Score]) -> list[Score]:
    """Of each drill the last score, in the order of the names. ``scores`` are oldest first."""
    return [one for _, one in sorted({one.drill: one for one in scores}.items())]


def page(scores: Sequence[Score], runbooks: Sequence[Runbook], machine: str) -> str:
    """One page: a row for each drill, a row for each runbook. ``machine``: what it ran on, in a line."""
    good = sum(one.passed for one in scores)
    days = sorted({one.began_utc[:10] for one in scores})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "-"
    lines = ["# Drills: `make drills`", "", f"{good} of {len(scores)} passed. {when}, {machine}.", "", _MEANS, "",
             *_table(_HEAD, [_row(one) for one in scores]), "",
             "## Steps of runbooks against a live fault", "", _STEPS, "",
             *_table(("runbook", "steps run", "not run", "drills"), [_covered(book, scores) for book in runbooks])]  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(score: Score) -> list[str]:
    at = [f"{value:.1f}" if (value := getattr(score.moments, name)) is not None else "-" for name in MOMENTS[1:]]
    fidelity = "-" if score.fidelity is None else f"{score.fidelity:.0%}"
    notes = "; ".join([*score.problems, *(f"false move: {one}" for one in score.false_moves)])
    return [score.drill, "passed" if score.passed else "**failed**", str(score.points), *at, ", ".join(score.verdicts) or "-",
            ", ".join(score.triage), fidelity, notes]  # fmt: skip


def _covered(book: Runbook, scores: Sequence[Score]) -> list[str]:
    """Of each step the best that it did, in any drill."""
    best: dict[str, Taken] = {}
    drills: dict[str, None] = {}
    for score in scores:
        for one in score.steps:
            if one.runbook == book.name:
                drills[score.drill] = None
                if one.exit_code is not None and (one.step not in best or one.outcome == "passed"):
                    best[one.step] = one
    ran = [f"{name} {_how(best[name])}" for name in (step.name for step in book.steps) if name in best]
    left = [step.name for step in book.steps if step.name not in best]
    return [book.name, ", ".join(ran) or "-", ", ".join(left) or "-", ", ".join(drills) or "none"]


def _how(one: Taken) -> str:
    return f"{one.seconds:.1f}" if one.outcome == "passed" else f"**{one.outcome}, exit {one.exit_code}**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = str.maketrans({"|": "\\|", "\n": " "})
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head),
            *(f"| {' | '.join(cell.translate(escaped) for cell in row)} |" for row in rows)]  # fmt: skip
