from __future__ import annotations

from pathlib import Path

import pytest

from opsctl.rollout import journal
from opsctl.rollout.deadlines import Times
from opsctl.rollout.journal import Journal, State
from opsctl.rollout.plan import Command, Plan, ServicePlan
from opsctl.rollout.result import without_service
from opsctl.service import record

PLAN = Plan("d", ("--set a=1",), (ServicePlan("s", "here", Command(("x",), {}), Command(("x", "--a", "1"), {}), {}),), "", "", Times())


def opened(path: Path) -> Journal:
    return Journal(path, lambda: "now", lambda: 1.5)


def test_what_was_written_is_there_for_the_next_process(tmp_path: Path) -> None:
    first = opened(tmp_path / "d" / "1.jsonl")
    first.write(State.planned, plan=PLAN, by="me")
    first.write(State.armed, token="1")
    again = opened(tmp_path / "d" / "1.jsonl")
    assert again.state is State.armed and again.plan == PLAN and again.entries == first.entries


def test_a_last_line_that_was_cut_in_half_announces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    opened(path).write(State.planned, plan=PLAN)
    whole = path.read_bytes()
    opened(path).write(State.armed)
    path.write_bytes(path.read_bytes()[:-5])
    assert opened(path).state is State.planned
    path.write_bytes(b"{broken\n" + whole)
    with pytest.raises(ValueError, match=r"1\.jsonl:1"):
        opened(path)


def test_a_line_after_a_half_one_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    opened(path).write(State.planned, plan=PLAN)
    opened(path).write(State.armed)
    path.write_bytes(path.read_bytes()[:-5])
    opened(path).write(State.reverting)
    assert opened(path).state is State.reverting


def test_journals_are_listed_oldest_first(tmp_path: Path) -> None:
    for name in ("20260102T000000-a", "20260101T000000-b"):
        opened(tmp_path / f"{name}.jsonl").write(State.planned, plan=PLAN)
    assert [path.stem for path in journal.all_of(tmp_path)] == ["20260101T000000-b", "20260102T000000-a"]


def test_the_first_decision_stands_for_everyone(tmp_path: Path) -> None:
    path = str(tmp_path / "x" / "decision")
    assert record.decide(path, "commit") == "commit"
    assert record.decide(path, "revert") == "commit"
    assert list(Path(path).parent.iterdir()) == [Path(path)]


@pytest.mark.parametrize(
    ("moments", "seconds"),
    [
        ({}, None),
        ({"group stopping": 1.0}, None),
        ({"group stopping": 1.0, "first good answer": 4.0}, 3.0),
        ({"group stopping": 1.0, "failure known": 3.0, "revert begun": 3.0}, None),
        ({"group stopping": 1.0, "failure known": 3.0, "revert begun": 3.0, "revert: first good answer": 6.0}, 5.0),
        (
            {"group stopping": 1.0, "first good answer": 2.0, "failure known": 9.0, "revert begun": 9.0, "revert: first good answer": 11.0},
            3.0,
        ),
    ],
)
def test_the_time_without_service_counts_only_the_gaps(moments: dict[str, float], seconds: float | None) -> None:
    assert without_service(moments) == seconds
