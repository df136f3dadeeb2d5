"""A day that is replayed: its document, what its steps must show, the table, and the journal's word on starts. No node boots."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from monitors import fleet
from opsctl.answer import Session
from opsctl.cli import main
from opsctl.playbooks import document as playbook_document
from opsctl.replay import cli, document, facts, judge, run, scaling
from opsctl.replay.document import Day, DayError, Tolerance
from opsctl.replay.facts import Captured, Changed, Reproduced, Wedged
from opsctl.replay.judge import Outcome
from opsctl.replay.pair import Pair, Serving, fleet_text
from opsctl.replay.run import Played
from opsctl.replay.stage import Stage, callers_toml
from opsctl.replay.starts import starts, tracebacks
from opsctl.staging import nodes
from opsctl.staging.gateway import Gateway

NAME = "incident-2026-09-27"
WHOLE = facts.Whole(4, 0.4, 2.0, 5, 11.0, 14.0, 50, 8.5)


@pytest.fixture
def day() -> Day:
    return document.read(document.days()[NAME])


@pytest.fixture
def raw() -> Any:
    return yaml.safe_load(document.days()[NAME].read_text())


def written(raw: Any, folder: Path) -> Path:
    path = folder / "day.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


# The document.


def test_the_day_that_ships_plays_every_step_of_the_incident_and_each_can_fail(day: Day) -> None:
    assert [step.name for step in day.steps] == ["wedge", "capture", "c-1", "c-2", "a", "overlap", "old-traceback", "lapsed", "held",
                                                 "undeclared", "fallback", "refusal", "s"]  # fmt: skip
    assert all(step.holds for step in day.steps)
    assert {step.kind for step in day.steps} == set(facts.KINDS)


def test_a_step_alone_is_played_with_what_it_needs_in_the_order_of_the_day(day: Day) -> None:
    assert [step.name for step in day.chosen(["held", "capture"])] == ["wedge", "capture", "overlap", "old-traceback", "held"]
    assert len(day.chosen([])) == len(day.steps)
    with pytest.raises(DayError, match="--only hold: no step of incident-2026-09-27; there are wedge, capture"):
        day.chosen(["hold"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["steps"][0]["holds"].update(after={"least": 0}), r"holds.after: a step of kind wedge measures after_s, health"),
        (lambda raw: raw["steps"][0].update(holds={}), "step wedge: holds nothing: it could not fail"),
        (lambda raw: raw["steps"][0].update(capture={}), "step wedge plays wedge and capture; give one of"),
        (lambda raw: raw["steps"][1].update(needs=["held"]), "step capture: needs held, which is no step before it"),
        (lambda raw: raw["steps"][1].update(name="wedge"), "step wedge: this name is taken"),
        (lambda raw: raw["table"][0].update(ours="{wedge[hang_s]:.1f}"), r"table, hang, .*: no fact wedge\[hang_s\]"),
        (lambda raw: raw["table"][0].update(ours="{later[after_s]}"), r"no fact later\[after_s\]"),
        (lambda raw: raw["steps"][0]["holds"]["health"].update(least=1), "give equals, one_of, or least and most"),
        (lambda raw: raw.update(watchdogs=1), "watchdogs: Extra inputs"),
    ],
)
def test_what_is_wrong_with_a_day_is_told_with_its_place(raw: Any, change: Any, said: str, tmp_path: Path) -> None:
    changed = copy.deepcopy(raw)
    change(changed)
    with pytest.raises(DayError, match=said):
        document.read(written(changed, tmp_path))


def test_its_experiments_are_valid_ones_and_say_what_was_scaled(day: Day) -> None:
    for step in day.steps:
        if step.repro is None:
            continue
        text, told = scaling.scaled(scaling.shipped(step.repro.of), step.repro.change, f"{NAME}-{step.name}")
        (experiment,) = [one.repro for one in playbook_document.parse(text, "made").playbook.method]
        assert experiment is not None and experiment.seconds <= step.deadline_s
        assert "->" in told
    text, told = scaling.scaled(scaling.shipped("repro-c"), {"runs": 1, "probes": {"most": 7, "constrained": True}}, "x")
    assert told == "runs 3 -> 1, probes.most 40 -> 7"


def test_its_clients_stand_in_the_fleet_file_as_the_day_names_them(day: Day, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(fleet_text(Serving(day.server, 60, 6), tmp_path, 9000) + callers_toml(day.callers, "http://127.0.0.1:1/v1"))
    one = fleet.load(path).one()
    assert {caller.name: (caller.probe, caller.via) for caller in one.caller} == {
        "scan": ("never-live", ""), "report": ("live", "http://127.0.0.1:1/v1"),
    }  # fmt: skip
    assert one.caller[1].request == day.callers[1].request
    assert [service.ranks for node in one.node for service in node.service] == [(0, 1), (2,)]


# What must hold.


@pytest.mark.parametrize(
    ("tolerance", "value", "wrong"),
    [
        (Tolerance(equals=3), 3, ()),
        (Tolerance(equals=3), 0, ("x is 0, and must be 3",)),
        (Tolerance(equals="reverted"), "", ("x is empty, and must be reverted",)),
        (Tolerance(equals=True), False, ("x is False, and must be True",)),
        (Tolerance(one_of=("a", "b")), "b", ()),
        (Tolerance(one_of=("a", "b")), "c", ("x is c, and must be a or b",)),
        (Tolerance(least=1), 1, ()),
        (Tolerance(least=1, most=2), 2.5, ("x is 2.5, and must be at least 1 and at most 2",)),
        (Tolerance(most=2), None, ("x is not measured, and must be at most 2",)),
    ],
)
def test_what_a_step_did_not_show_is_named(tolerance: Tolerance, value: Any, wrong: tuple[str, ...]) -> None:
    assert judge.problems({"x": tolerance}, {"x": value}) == wrong


# The table.


def outcomes_of(day: Day) -> list[Outcome]:
    """A day on which everything was measured."""
    hang = Reproduced(9, "reproduced", "", 5.0, 2, 0, 0, "hang_grammar_barrier", 0.5, 1.2, None, None, None, 0, 0, "")
    refused = Reproduced(0, "not reproduced", "", 61.0, 30, 100, 100, "", 1.0, None, 0.01, 0.05, 0.06, 0, 0, "")
    changed = Changed(0, "committed", "", "client path", 30.0, 1, 2.5, 17.2, 12.0, 6.0, 2, 1, None, 40.0, 90.0, 41.0, 91.0)
    made = {"wedge": Wedged(0.4, 200, "wait_device", 2), "repro": hang, "rollout": changed,
            "capture": Captured(5.1, 9.8, 50.2, 27, 3, "hang_grammar_barrier", 0.97, True, True, "b")}  # fmt: skip
    return [Outcome(step.name, step.says, 1.0, msgspec.to_builtins(refused if step.name == "s" else made[step.kind])) for step in day.steps]


def test_the_table_sets_that_days_figures_beside_ours(day: Day) -> None:
    lines = judge.table(day, outcomes_of(day), WHOLE).splitlines()
    assert len(lines) == 2 + len(day.table)
    assert any("| hang, after the constrained request | 24 to 47 s | 0.4 to 2.0 s, 4 hangs | no; " in line for line in lines)
    assert any("100 of 100 in 61 s" in line and "one each 0.6 s" in line for line in lines)
    assert judge.NOT_PLAYED not in "\n".join(lines)


def test_a_figure_that_was_not_measured_is_none_of_ours(day: Day) -> None:
    found = [one for one in outcomes_of(day) if one.step == "wedge"]
    rows = {what: ours for what, _, ours, _ in judge.rows(day, found, WHOLE)}
    assert rows["constrained requests refused"] == judge.NOT_PLAYED
    assert rows["hang, after the constrained request"] == "0.4 to 2.0 s, 4 hangs"
    none = msgspec.structs.replace(WHOLE, hang_least_s=None)
    assert {what: ours for what, _, ours, _ in judge.rows(day, found, none)}["hang, after the constrained request"] == judge.NOT_MEASURED


def test_the_whole_day_counts_hangs_restarts_and_turns_of_all_steps() -> None:
    hang = Reproduced(9, "reproduced", "", 5.0, 2, 0, 0, "hang_grammar_barrier", 0.5, 1.2, None, None, None, 0, 0, "")
    clean = Reproduced(0, "not reproduced", "", 5.0, 7, 3, 3, "", 0.9, None, None, None, None, 0, 0, "")
    change = Changed(0, "committed", "", first_answer_s=9.0)
    whole = facts.whole({"w": Wedged(0.4, 200, "wait_device", 2), "c": hang, "a": clean, "r": change}, [12.5], 90)
    assert (whole.hangs, whole.hang_least_s, whole.hang_most_s) == (2, 0.4, 1.2)
    assert (whole.restarts, whole.restart_least_s, whole.restart_most_s) == (2, 9.0, 12.5)
    assert (whole.turns, whole.minutes) == (11, 1.5)


def test_what_is_told_names_the_step_that_failed(day: Day) -> None:
    bad = Outcome("held", "says", 9.0, {}, ("outcome is inconclusive, and must be reproduced",))
    left = Outcome("s", "says", 0.0, {}, skipped="needs refusal, which did not show what it should")
    played = Played(NAME, (bad, left), WHOLE, "/f", "")
    text = cli.told(day, played)
    assert "FAILED held" in text and "outcome is inconclusive, and must be reproduced" in text
    assert "2 steps, 2 not as they must be" in text
    assert played.failed == (bad, left)


# A step that cannot be played, and what hangs on it.


def stage_of(day: Day, folder: Path, told: list[str]) -> Stage:
    """A stage whose nodes never booted."""
    gateway = Gateway("http://127.0.0.1:9")
    gateway.close()
    return Stage(Pair(folder, {}, Serving(day.server, 60, 6), ()), day, gateway, told.append)


def test_a_step_that_cannot_be_played_says_why_and_what_needs_it_is_left_out(day: Day, tmp_path: Path) -> None:
    told: list[str] = []
    stage = stage_of(day, tmp_path, told)
    (capture,) = [step for step in day.steps if step.name == "capture"]
    alone = capture.model_copy(update={"needs": ()})
    found = run.one(stage, alone, [], {})
    assert found.problems == ("could not be played: nothing is wedged: there is nothing to capture",) and not found.good
    left = run.one(stage, capture, [msgspec.structs.replace(found, step="wedge")], {})
    assert left.skipped == "needs wedge, which did not show what it should" and not left.good
    assert told[-1].startswith("capture: not played: wedge")


# The journal's word.


def entry(at: float, message_id: str = "", invocation: str = "", message: str = "") -> dict[str, Any]:
    return {"__REALTIME_TIMESTAMP": str(int(at * 1e6)), "MESSAGE_ID": message_id, "INVOCATION_ID": invocation, "MESSAGE": message}


STARTING, STARTED, EXITED = "7d4958e842da4a758f6c1cdc7b36dcc5", "39f53479d3a045ac8e11786248231fbf", "98e322203f7a4ed290d09fe03c09fe15"


def a_start(at: float, invocation: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    return [entry(at + n, kind, invocation) for n, kind in enumerate(kinds)]


def test_a_start_counts_as_failed_when_its_process_ended_before_it_was_up() -> None:
    journal = [
        *a_start(90, "old", (STARTING, STARTED)), entry(101, EXITED, "old"),  # the one that was stopped for the change
        *a_start(102, "one", (STARTING, EXITED)), *a_start(110, "two", (STARTING, EXITED)),
        *a_start(120, "good", (STARTING, STARTED)), entry(150, EXITED, "good"),
    ]  # fmt: skip
    found = starts(journal, since_s=100)
    assert (found.begun, found.failed) == (3, 2)
    assert starts(journal, since_s=105).failed == 1


def test_tracebacks_are_counted_whichever_start_wrote_them() -> None:
    head = "Traceback (most recent call last):"
    journal = [entry(1, message=head), entry(2, message="  File x"), entry(3, message=f"[2026] {head}")]
    assert tracebacks([*journal, {"__REALTIME_TIMESTAMP": "1", "MESSAGE": [1, 2]}, {"__REALTIME_TIMESTAMP": "1"}]) == 2


# Where it cannot be played.


def test_where_nodes_cannot_be_booted_it_says_what_is_missing_and_plays_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes, "missing", lambda *, ssh: "systemd nodes need root")
    out = io.StringIO()
    session = Session({"XDG_STATE_HOME": str(tmp_path)}, io.StringIO(), out, io.StringIO())
    cli.run(session, NAME, [], "", as_json=True)
    answer = json.loads(out.getvalue())
    assert (answer["exit_code"], session.exit_code) == (2, 2)
    assert answer["errors"][0]["message"] == "systemd nodes need root"
    assert "make node-packages" in answer["errors"][0]["remedy"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((NAME, "drill-stopped"), "name it alone"),
        ((NAME, "--fleet", "fleet.toml"), "name it alone"),
        (("drill-stopped", "--only", "wedge"), "--only: of a day that is replayed; there are incident-2026-09-27"),
        ((NAME, "--only", "hold"), "--only hold: no step of incident-2026-09-27"),
    ],
)
def test_a_day_is_asked_for_alone(words: Sequence[str], said: str, tmp_path: Path) -> None:
    err = io.StringIO()
    code = main(["drill", "run", *words], {"XDG_STATE_HOME": str(tmp_path)}, stdin=io.StringIO(), stdout=io.StringIO(), stderr=err)
    assert code == 2 and said in err.getvalue()


def test_the_day_is_listed_among_the_drills() -> None:
    out = io.StringIO()
    assert main(["drill", "list"], {}, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 0
    assert any(line.startswith(NAME) for line in out.getvalue().splitlines())


def test_a_root_that_may_make_no_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if why := nodes.missing():
        pytest.skip(why)
    for name, text in (("unshare", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"), ("nsenter", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nodes.missing() == "systemd nodes need namespaces of their own: unshare: unshare failed: Operation not permitted"
