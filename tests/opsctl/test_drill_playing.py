"""What a drill makes of its monitor's events and of pages."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from opsctl.drill.playing import Deadlines, Playing
from opsctl.drill.score import Moments, Score
from opsctl.drill.stage import Stage, Traffic
from opsctl.playbooks.schema import Drill, Expectation, Playbook, Step
from opsctl.playbooks.server import Deployed
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
        stage = Stage("fleet.toml", cast(Any, None), {}, tmp_path, cast(Deployed, None), watcher, [], own=True)
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
