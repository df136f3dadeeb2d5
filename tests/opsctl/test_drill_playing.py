"""What a drill makes of its monitor's events and of pages."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from monitors import fleet
from opsctl.drill.person import Person
from opsctl.drill.playing import Deadlines, Playing
from opsctl.drill.score import Moments, Score
from opsctl.drill.stage import Stage, Traffic
from opsctl.playbooks.schema import Change, Drill, Expectation, Playbook, Step
from opsctl.playbooks.server import Deployed
from opsctl.runbooks.run import RunRecord, StepRecord
from opsctl.staging.callers import CallerWatch
from opsctl.staging.clients import AgentLoop, Loop, ToolLoop
from opsctl.staging.watcher import Watcher

INJECTED = 100.0
BOTH = Drill(verdicts=("health_lies",), also=("hang_tp_desync",), told_apart=True, canary=True)

Play = Callable[..., Playing]


def verdict(name: str, at: float) -> dict[str, Any]:
    return {"event": "verdict", "verdict": name, "confidence": 0.9, "mono_s": at}


def canary(answer: str, at: float, *, loaded: bool = True) -> dict[str, Any]:
    return {"event": "canary", "answer": answer, "loaded": loaded, "mono_s": at}


@pytest.fixture
def said() -> list[str]:
    """What the drill tells whoever plays it."""
    return []


@pytest.fixture
def play(tmp_path: Path, said: list[str]) -> Iterator[Play]:
    """A drill whose monitor is a process that says ``events`` and lives on."""
    watchers: list[Watcher] = []

    def playing(drill: Drill, *events: dict[str, Any], mode: str = "auto") -> Playing:
        (tmp_path / "events").write_text("".join(json.dumps(event) + "\n" for event in events))
        process = subprocess.Popen(["sh", "-c", f"cat {tmp_path}/events; exec sleep 60"], stdout=subprocess.PIPE, text=True)
        watchers.append(watcher := Watcher(process))
        playbook = Playbook(name="drill-x", kind="drill", summary=".", hypothesis=(Expectation(probe="answer"),),
                            method=(Step(name="look", run="opsctl version", deadline_s=5),), drill=drill)  # fmt: skip
        (tmp_path / "fleet.toml").write_text('[deployment.flash]\nengine = "lastbatch"\napi = "http://127.0.0.1:1"\n'
                                             '[[deployment.flash.node]]\nname = "a"\n')  # fmt: skip
        env = {name: str(tmp_path) for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "OPSCTL_MONITOR")}
        deployment = fleet.load(tmp_path / "fleet.toml").one("flash")
        stage = Stage(str(tmp_path / "fleet.toml"), deployment, env, tmp_path, cast(Deployed, None), watcher, [], own=True)
        made = Playing(playbook, stage, said.append, Score("drill-x", mode, "", Moments()), Traffic("", "agent"), Deadlines(), INJECTED)
        until = time.monotonic() + 20
        while len(made.events) < len(events):
            assert time.monotonic() < until
            made.look()
        return made

    yield playing
    for watcher in watchers:
        watcher.close()


def test_two_causes_are_named_by_two_verdicts_and_one_of_them_said_twice_is_none(play: Play) -> None:
    once = play(BOTH, verdict("health_lies", 110.0), verdict("health_lies", 112.0))
    assert once.score.verdicts == ["health_lies"] and not once.is_named
    both = play(BOTH, verdict("health_lies", 110.0), verdict("hang_tp_desync", 130.0))
    assert both.is_named and both.seen == 130.0


def test_what_the_monitor_said_before_the_injection_is_no_verdict_on_it(play: Play) -> None:
    assert play(BOTH, verdict("health_lies", 99.0)).score.verdicts == []


def test_where_answers_were_wrong_only_one_that_equals_the_answer_at_rest_beside_others_is_good(play: Play) -> None:
    wrong = Drill(verdicts=("health_lies",), canary=True)
    found = play(wrong, canary("same", 101.0), canary("different", 103.0), canary("same", 120.0, loaded=False), canary("same", 125.0))
    found.score.moments.detected = 10.0
    assert found.good() == 125.0


@pytest.mark.parametrize(("loop", "good"), [(AgentLoop, False), (ToolLoop, True)])
def test_after_a_change_by_hand_a_good_turn_is_the_end_of_it_only_for_a_client_that_can_tell(
    play: Play, loop: type[Loop], good: bool
) -> None:
    found = play(Drill(by_hand=Change(set={"fault": "answers.markup"})))
    found.score.moments.detected, found.before = 10.0, "the digest of what was verified"
    found.traffic.loops.append(client := loop(""))
    client.good_at += [INJECTED + 5.0, INJECTED + 20.0]
    assert found.good() == (INJECTED + 20.0 if good else None), "no rank runs that configuration"


def test_what_the_captures_of_a_runbook_said_is_taken_from_its_record(play: Play) -> None:
    found = play(Drill(verdicts=("hang_unknown",), recaptured="hang_tp_desync"))
    said = "black_box  3 ranks\nhang_tp_desync  (confidence 0.85)\nbundle /b, 31 items in 5.0 s\n  for      rank 1 stands elsewhere"
    steps = [StepRecord("show", "Evidence first", "opsctl bundle show /b", "passed", said="hang_unknown  (confidence 0.50)"),
             StepRecord("capture-native", "Evidence first", "opsctl capture --native", "passed", said=said)]  # fmt: skip
    found.ran(RunRecord("1", "hang_unknown", "flash", "somebody", "2026-11-30T05:41:00Z", steps=steps))
    assert found.score.recaptured == ["hang_tp_desync"]


def test_a_page_before_the_injection_is_a_false_move_and_news_is_no_page(play: Play) -> None:
    found = play(BOTH)
    found.stage.pages += [(99.0, "flash: crash", ""), (105.0, "over: flash: crash", ""), (107.5, "flash: crash", "")]
    found.look()
    assert (found.score.paged, found.score.moments.detected) == (1, 7.5)
    assert found.score.false_moves == ["a page before anything was injected: flash: crash"]


def test_a_person_sees_the_page_as_it_was_sent_and_not_what_the_monitor_thinks(play: Play, said: list[str]) -> None:
    found = play(BOTH, verdict("health_lies", 110.0), mode="attended")
    found.stage.pages.append((112.0, "flash: health_lies", "bundle: /b"))
    found.look()
    told = "\n".join(said)
    assert "PAGE: flash: health_lies" in told and "bundle: /b" in told
    assert "verdict:" not in told


def test_a_person_is_told_where_to_work_gets_the_hints_that_were_asked_for_and_may_give_up(play: Play, said: list[str]) -> None:
    found = play(Drill(verdicts=("hang_stopped",), runbook="hang_stopped"), verdict("hang_stopped", 110.0), mode="attended")
    lines = iter(("h\n", "h\n", "q\n", ""))
    began = time.monotonic()
    Person(lambda: next(lines), deadline_s=60.0).respond(found)
    assert time.monotonic() - began < 20.0
    told = "\n".join(said)
    assert f"FLEET={found.stage.fleet_path} DEPLOYMENT=flash" in told and "XDG_STATE_HOME=" in told
    assert said[-2:] == ["        hint: read the page, then the report of the bundle: opsctl bundle show $BUNDLE",
                         "        hint: the monitor calls it hang_stopped"]  # fmt: skip
    assert found.score.hints == 2 and found.score.problems == ["given up"]
    assert found.deadlines.mitigate_s == 0.0


def test_a_person_who_does_not_mend_it_in_time_has_failed(play: Play) -> None:
    found = play(Drill(verdicts=("hang_stopped",)), mode="attended")
    Person(lambda: "", deadline_s=0.2).respond(found)
    assert found.score.problems == ["not mended within 0.2 s"]


def test_while_a_runbook_is_under_way_it_is_not_over_although_clients_get_answers_again(play: Play, tmp_path: Path) -> None:
    found = play(Drill(verdicts=("hang_stopped",)), mode="attended")
    found.traffic.loops.append(loop := AgentLoop(""))
    loop.good_at.append(INJECTED + 10.0)
    folder = tmp_path / "lastbatch" / "runbooks" / "flash"
    folder.mkdir(parents=True)
    for name, outcome in (("1", ""), ("1", "done")):
        record = RunRecord(name, "hang_stopped", "flash", "somebody", "2026-11-30T05:41:00Z", outcome=outcome)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(record))
        Person(lambda: "", deadline_s=0.3).respond(found)
        assert found.score.problems == ["not mended within 0.3 s"]  # of the first turn; the second adds none


def test_where_clients_come_by_a_gateway_what_their_watch_ends_with_is_the_verdict(play: Play, said: list[str]) -> None:
    found = play(Drill(verdicts=("hosted_fallback",), gateway=True))
    ended = 'echo \'{"data": {"verdict": "hosted_fallback"}}\'; exit 9'
    found.stage.callers = CallerWatch(subprocess.Popen(["sh", "-c", ended], stdout=subprocess.PIPE, text=True))
    try:
        assert found.until(lambda: found.is_named, 20)
        found.look()
    finally:
        found.stage.callers.close()
    assert found.score.verdicts == ["hosted_fallback"]
    assert [line for line in said if "verdict" in line] == ["        verdict: hosted_fallback (by the clients' own way)"]
