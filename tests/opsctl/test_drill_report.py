"""The page of drills: who passed, and what each runbook's steps did against a live fault."""

from __future__ import annotations

from opsctl.drill import report
from opsctl.drill.score import Moments, Score, Taken, table
from opsctl.runbooks.document import Runbook, Step


def score(drill: str, *steps: Taken, passed: bool = True, began: str = "2026-11-30T05:41:00+00:00") -> Score:
    return Score(drill, "auto", began, Moments(0.0, 5.0, 8.0, 30.0, None), verdicts=["hang_stopped"], steps=list(steps), points=90,
                 passed=passed, problems=[] if passed else ["never recovered"])  # fmt: skip


def book(*names: str) -> Runbook:
    steps = tuple(Step(name, "opsctl version", 5.0, (0,), "", "Evidence first", 9) for name in names)
    return Runbook("hang_stopped", "hang_stopped", "page", ".", {}, steps, "", "hang_stopped.md")


def test_of_each_drill_the_last_score_counts() -> None:
    old, new = score("drill-stopped", passed=False), score("drill-stopped")
    assert report.latest([old, score("drill-crash"), new]) == [score("drill-crash"), new]


def test_the_page_says_of_each_step_what_it_did_and_which_were_not_run() -> None:
    ran = Taken("hang_stopped", "capture", "passed", 4.2, 0)
    failed = Taken("hang_stopped", "confirm", "failed", 9.0, 9, "exit code 9")
    skipped = Taken("hang_stopped", "thaw", "skipped", why="left out by --skip")
    page = report.page([score("drill-stopped", ran, failed, skipped)], [book("capture", "thaw", "confirm")], "a CPU, 2 cores")
    assert "| hang_stopped | capture 4.2, confirm **failed, exit 9** | thaw | drill-stopped |" in page
    assert "1 of 1 passed. 2026-11-30, a CPU, 2 cores" in page


def test_a_step_that_passed_in_one_drill_counts_although_it_failed_in_another() -> None:
    good, bad = Taken("hang_stopped", "capture", "passed", 4.2, 0), Taken("hang_stopped", "capture", "failed", 1.0, 9)
    for steps in ((good, bad), (bad, good)):
        page = report.page([score(f"drill-{at}", step) for at, step in enumerate(steps)], [book("capture")], "")
        assert "| capture 4.2 | - | drill-0, drill-1 |" in page


def test_a_runbook_that_no_drill_goes_through_is_named() -> None:
    assert "| hang_stopped | - | capture | none |" in report.page([], [book("capture")], "")


def test_a_failed_drill_says_why_in_a_cell_that_does_not_break_the_table() -> None:
    wrong = score("drill-stopped", passed=False)
    wrong.problems = ["exit code 9 | a\nb"]
    assert "exit code 9 \\| a b |" in report.page([wrong], [], "")


def test_the_scoreboard_lists_the_steps_below() -> None:
    text = table([score("drill-stopped", Taken("hang_stopped", "capture", "passed", 4.2, 0), Taken("hang_stopped", "thaw", "skipped"))])
    assert text.splitlines()[-1] == "drill-stopped  hang_stopped: capture (4.2 s), thaw (skipped)"
