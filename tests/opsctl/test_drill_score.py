"""What a drill is worth, and when it is due again."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from opsctl.drill import history
from opsctl.drill.score import Moments, Score, overdue, table
from opsctl.playbooks.schema import Drill, Targets
from opsctl.replay import facts
from opsctl.replay.cli import scored
from opsctl.replay.judge import Outcome
from opsctl.replay.run import Played

DRILL = Drill(verdicts=("hang_stopped",), targets=Targets(detected_s=10, captured_s=20, mitigated_s=60, recovered_s=90))


def score(**given: object) -> Score:
    whole: dict[str, object] = {"verdicts": ["hang_stopped"], "paged": 1, "moments": Moments(0.0, 5.0, 8.0, 30.0, 31.0)}
    return Score("drill-stopped", "auto", "2026-11-30T05:41:00+00:00", **{**whole, **given})  # type: ignore[arg-type]


def judged(drill: Drill = DRILL, **given: object) -> Score:
    found = score(**given)
    found.judge(drill)
    return found


def test_all_in_time_and_rightly_named_is_a_hundred_points() -> None:
    assert (judged().passed, judged().points, judged().problems) == (True, 100, [])


def test_undetected_is_a_failure_however_soon_it_was_over() -> None:
    found = judged(moments=Moments(0.0, None, 8.0, 9.0, 9.5), paged=0)
    assert not found.passed and found.points == 0
    assert "nobody was paged" in found.problems


def test_another_verdict_no_capture_and_no_end_are_failures() -> None:
    found = judged(verdicts=["crash"], moments=Moments(0.0, 5.0, None, None, None))
    assert found.problems == ["the verdict was crash, not hang_stopped", "nothing was captured", "never mitigated", "never recovered"]


def test_what_came_late_costs_points_and_is_named() -> None:
    moments = Moments(0.0, 11.0, 12.0, 30.0, 100.0)
    assert overdue(moments, DRILL.targets) == ["detected", "recovered"]
    assert judged(moments=moments).passed
    assert judged(moments=moments).points == 80


def test_where_the_monitor_could_not_tell_a_capture_of_the_runbook_must() -> None:
    blind = Drill(verdicts=("hang_unknown",), recaptured="hang_tp_desync")
    assert judged(blind, verdicts=["hang_unknown"], recaptured=["hang_unknown", "hang_tp_desync"]).passed
    assert judged(blind, verdicts=["hang_unknown"]).problems == ["no capture of the runbook said hang_tp_desync"]


def test_hints_false_moves_and_edited_steps_cost_points() -> None:
    assert judged(hints=2).points == 90
    assert judged(false_moves=["confirm: exit code 1"]).points == 90
    assert judged(fidelity=0.5).points == 90


def test_a_page_for_what_pages_nobody_is_a_failure() -> None:
    quiet = Drill(verdicts=("slow_not_hung",), pages=False)
    assert judged(quiet, verdicts=["slow_not_hung"], paged=0, moments=Moments(0.0, None, 8.0, 9.0, 9.0)).passed
    assert judged(quiet, verdicts=["slow_not_hung"], paged=1).problems == ["somebody was paged for what pages nobody"]


def test_the_scoreboard_says_each_moment_and_each_problem() -> None:
    text = table([judged(), judged(verdicts=["crash"])])
    lines = text.splitlines()
    assert lines[0].split() == [
        "drill",
        "outcome",
        "points",
        "detected",
        "captured",
        "mitigated",
        "recovered",
        "verdict",
        "fidelity",
        "false",
        "moves",
    ]
    assert "5.0 s" in lines[1] and "passed" in lines[1]
    assert "FAILED" in lines[2] and "the verdict was crash" in lines[2]


def test_the_calendar_puts_what_was_never_passed_first_and_then_the_most_overdue() -> None:
    today = datetime.date(2026, 11, 30)
    scores = []
    for name, day, passed in (("old", "2026-08-01", True), ("fresh", "2026-11-29", True), ("failed", "2026-11-29", False)):
        one = score()
        one.drill, one.began_utc, one.passed = name, f"{day}T05:41:00+00:00", passed
        scores.append(one)
    every_days = {"fresh": 90, "old": 90, "failed": 90, "never": 90}
    assert [(due.drill, due.days) for due in history.calendar(every_days, scores, today)] == [
        ("failed", None), ("never", None), ("old", -31), ("fresh", 89)]  # fmt: skip


@pytest.mark.parametrize(
    ("problems", "outcome"), [((), (True, 100, [])), (("x is 1, and must be 2",), (False, 0, ["wedge: x is 1, and must be 2"]))]
)
def test_a_day_that_was_replayed_is_as_good_as_its_steps(problems: tuple[str, ...], outcome: tuple[bool, int, list[str]]) -> None:
    steps = (Outcome("wedge", "it hangs", 3.0, {}, problems), Outcome("a", "it does not", 1.0, {}))
    found = scored(Played("incident-2026-09-27", steps, facts.whole({}, [], 4.0), "/folder", ""), 1_790_000_000.0)
    assert (found.passed, found.points, found.problems) == outcome
    assert history.calendar({found.drill: 90}, [found], datetime.date(2026, 9, 21))[0].days == (90 if found.passed else None)


def test_history_is_kept_and_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "drills" / "history.jsonl"
    assert history.read(path) == []
    history.add(path, judged())
    with path.open("ab") as file:
        file.write(b'{"drill": "drill-sto')
    assert [one.drill for one in history.read(path)] == ["drill-stopped"]
    history.add(path, judged())
    assert [one.drill for one in history.read(path)] == ["drill-stopped", "drill-stopped"]


def test_the_trend_is_a_drawing_with_a_curve_for_each_moment_that_came() -> None:
    drawn = history.trend([judged(), judged(moments=Moments(0.0, 6.0, 9.0, None, None))])
    assert drawn.startswith("<svg") and "drill-stopped" in drawn
    assert all(name in drawn for name in ("detected", "captured", "mitigated"))


def test_two_causes_need_both_verdicts_and_a_finding_of_triage_for_each() -> None:
    both = Drill(verdicts=("health_lies",), also=("hang_tp_desync",), told_apart=True)
    said = ["health_lies", "hang_tp_desync"]
    assert judged(both, verdicts=said, triage=said).passed
    assert judged(both, verdicts=said, triage=said[:1]).problems == ["triage did not tell hang_tp_desync"]
    assert judged(both, verdicts=said[:1], triage=said).problems == ["the monitor did not say hang_tp_desync besides"]
