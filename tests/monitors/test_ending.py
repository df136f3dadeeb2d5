"""How a server ends, by its log: told to stop, or of what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitors import casefolder, engines
from monitors.judge import ending
from monitors.judge.ending import Ending
from monitors.judge.scene import Log
from monitors.judge.verdict import Class, Verdict
from monitors.observe import batchlog

STARTED = "[opsctl] Started s: main process 7, invocation ab."
TRACE = 'Traceback (most recent call last):\n  File "x.py", line {0}, in step\n    work()\n{1}'
EXIT = "[opsctl] Main process exited, code=exited, status=1\n[opsctl] Failed with result 'exit-code'. Restarting in 1 s."
AGAIN = "[opsctl] Scheduled restart job, restart counter is at {0}.\n" + STARTED
DECODE = "[2026-03-02 10:00:05 TP0] Decode batch, #running-req: 2, #token: 9, gen throughput (token/s): 5.0, #queue-req: 1"


def log(*lines: str, engine: str = "lastbatch") -> Log:
    return batchlog.read_text(("\n".join(lines) + "\n").encode(), engines.load(engine), "server.log")


@pytest.mark.parametrize(
    "line",
    ["Stopping flash.service - The server...", "Mar 02 10:00:06 host systemd[1]: Stopping The server...", "[opsctl] Stopping.",
     "[2026-03-02 10:00:05] Ending: SIGTERM", "[2026-03-02 10:00:05] SIGTERM received. Draining requests and shutting down..."],
)  # fmt: skip
def test_an_order_is_told_by_the_service_manager_or_by_the_server(line: str) -> None:
    found = ending.order(log(STARTED, DECODE, line, "[opsctl] Main process exited, code=killed, status=9/KILL", engine="sglang"))
    assert found is not None or "Ending" in line
    assert ending.order(log(STARTED, line)) is not None
    assert ending.order(log(STARTED, line, "[opsctl] Stopped.", STARTED)) is None, "another start has begun"


def test_an_order_that_comes_after_the_death_is_none_and_a_child_is_told_to_stop_by_a_parent_that_fails() -> None:
    died = ending.order(log(STARTED, EXIT, "[opsctl] Stopped while it was waiting to be restarted."))
    failing = ending.order(log(STARTED, TRACE.format(3, "ValueError: no"), "worker 3 received SIGTERM"))
    assert died is None and failing is None
    assert ending.order(log("Stopped flash.service - The server.", "Started flash.service - The server.")) is None, "a restart by itself"


def test_a_cause_is_an_exception_before_an_exit_and_forgotten_when_the_server_works_on() -> None:
    trace = TRACE.format(31, "TypeError: 7 is not it")
    assert Ending().take(log(STARTED, trace, EXIT)).cause == "TypeError: # is not it"
    assert Ending().take(log(STARTED, trace, DECODE)).cause == ""
    assert Ending().take(log(STARTED, EXIT)).cause.startswith("exit: ")
    # What the next start says takes the place; until then the last one's end is still to be read.
    state = Ending().take(log(STARTED, trace, EXIT, AGAIN.format(1)))
    assert state.cause.startswith("TypeError") and state.take(log("x")).cause == ""


def test_deaths_are_counted_by_cause_and_a_watchdogs_and_ordered_ones_are_no_crash() -> None:
    watchdog = "[2026-03-02 10:00:05] Ending: rank 0 has not moved for 60 s (--watchdog-timeout 60)"
    trace = TRACE.format(31, "TypeError: 7 is not it")
    told = log(STARTED, watchdog, EXIT, AGAIN.format(1), trace, EXIT, AGAIN.format(2), "[opsctl] Stopping.", STARTED, trace, EXIT)
    assert ending.deaths(told) == ["watchdog", "TypeError: # is not it", "TypeError: # is not it"]
    assert ending.others(told) == 1
    assert ending.others(log(STARTED, trace, EXIT, AGAIN.format(1), EXIT)) == 1, "an exit without a word is not known to be of that kind"
    assert ending.others(log(STARTED, EXIT, AGAIN.format(1), EXIT)) == 0


def test_an_ordered_end_and_the_next_start_in_one_piece_of_the_log_are_no_death() -> None:
    """A look that comes late reads all of it at once: the order, the kill after it, and what the next start says."""
    killed = "[opsctl] Main process exited, code=killed, status=9/KILL"
    ready = "[2026-03-02 10:01:05] Ready: configuration abc, invocation 1234"

    def tells(before: Ending, *lines: str) -> tuple[int, bool]:
        piece = log(*lines)
        state = before.take(piece)
        return state.died, any(state.tells(notice) for notice in piece.notices)

    running = Ending().take(log(STARTED, ready))
    assert tells(running, "[opsctl] Stopping.", killed, "[opsctl] Stopped.", STARTED, ready) == (0, False)
    assert tells(running, killed, AGAIN.format(1), ready) == (1, True)
    assert tells(running, "[opsctl] Stopping.", "[opsctl] Stopped.", STARTED, killed) == (1, True), "it was the next one that died"
    dead = running.take(log(killed))
    assert dead.died == 1 and tells(dead, AGAIN.format(1)) == (0, True) and tells(dead, DECODE) == (0, False)


def judged(folder: Path, *lines: str) -> Verdict:
    (folder / "server.log").write_text("\n".join(("[2026-03-02 10:00:00] lastbatch begins", *lines)) + "\n")
    return casefolder.judge(folder)


def test_a_watchdogs_kill_and_one_crash_later_are_no_loop_and_a_count_is_of_lines_that_are_there(tmp_path: Path) -> None:
    watchdog = "[2026-03-02 10:00:05] Ending: rank 0 has not moved for 60 s (--watchdog-timeout 60)"
    ready = "[2026-03-02 10:01:05] Ready: configuration abc, invocation 1234"
    trace = TRACE.format(31, "TypeError: 7 is not it")
    once = judged(tmp_path, STARTED, ready, watchdog, EXIT, AGAIN.format(1), ready, DECODE, trace, EXIT, AGAIN.format(2))
    assert once.verdict is Class.crash, once.to_json()
    assert not any("times)" in item.text for item in once.evidence), once.to_json()
    twice = judged(tmp_path, STARTED, ready, trace, EXIT, AGAIN.format(1), ready, DECODE, trace, EXIT, AGAIN.format(2))
    assert twice.verdict is Class.crash_loop, twice.to_json()


def test_a_server_that_was_told_to_stop_is_no_crash_though_its_processes_are_gone(tmp_path: Path) -> None:
    ready = "[2026-03-02 10:01:05] Ready: configuration abc, invocation 1234"
    (tmp_path / "progress.json").write_text('{"ended": true, "ends": 1}')
    (tmp_path / "health.txt").write_text("GET /health -> no answer\n")
    killed = "[opsctl] Main process exited, code=killed, status=9/KILL"
    told = judged(tmp_path, STARTED, ready, "[2026-03-02 10:02:05] Ending: SIGTERM", killed)
    assert told.verdict is Class.idle_not_hung and "told to stop" in told.evidence[0].text, told.to_json()
    assert judged(tmp_path, STARTED, ready, killed).verdict is Class.crash


API = [{"pid": 7, "thread_id": 7, "thread_name": "MainThread", "os_thread_id": 7, "active": False, "owns_gil": False, "frames": [
    {"name": "EpollSelector.select", "filename": "selectors.py", "short_filename": "selectors.py", "line": 468},
    {"name": "main", "filename": "engine/server/main.py", "short_filename": "engine/server/main.py", "line": 110}]}]  # fmt: skip


def test_what_went_wrong_before_an_ordered_restart_says_nothing_of_the_start_that_loads_now(tmp_path: Path) -> None:
    """Nothing runs yet but the process that answers HTTP: it is no rank, and waits for none."""
    ready = "[2026-03-02 10:01:05] Ready: configuration abc, invocation 1234"
    trace = TRACE.format(31, "TypeError: 7 is not it")
    again = "[2026-03-02 10:04:05] Starting rank 0, 1, 2 with small, configuration abc"
    (tmp_path / "health.txt").write_text("GET /health_scheduler -> 503 loading\n")
    (tmp_path / "systemctl-show-s.txt").write_text("ActiveState=activating\nNRestarts=0\nResult=success\n")
    (tmp_path / "pyspy-api_here.json").write_text(json.dumps(API))
    (tmp_path / "pyspy-api_here.t3.json").write_text(json.dumps([{**API[0], "frames": API[0]["frames"][1:]}]))
    crashed = (STARTED, ready, DECODE, trace, EXIT, AGAIN.format(1), ready, DECODE)
    loads = judged(tmp_path, *crashed, "[opsctl] Stopping.", "[opsctl] Stopped.", STARTED, again)
    assert loads.verdict is Class.loading_not_hung, loads.to_json()
    assert not [
        item.text for item in loads.evidence if "Restarting" in item.text or "restart job" in item.text or "rank waits" in item.text
    ]
    fresh = judged(tmp_path, STARTED, again)
    assert fresh.verdict is Class.loading_not_hung, fresh.to_json()


def test_a_watchdogs_word_while_it_was_told_to_stop_is_not_held_against_the_start_that_crashes_next(tmp_path: Path) -> None:
    """A server that stands still is ended by its own watchdog in an ordered restart; that start's wedge is over."""
    ready = "[2026-03-02 10:01:05] Ready: configuration abc, invocation 1234"
    stopped = ("[opsctl] Stopping.", "[2026-03-02 10:02:05] Ending: SIGTERM",
               "[2026-03-02 10:02:05] rank 0 has not moved for 8 s: there is nothing to wait for",
               "[opsctl] Main process exited, code=exited, status=1", "[opsctl] Stopped.")  # fmt: skip
    other = "[opsctl] Started s: main process 8, invocation cd."
    (tmp_path / "progress.json").write_text('{"ended": true, "ends": 1}')
    found = judged(tmp_path, STARTED, ready, DECODE, *stopped, other, ready, DECODE, TRACE.format(31, "TypeError: 7 is not it"), EXIT)
    assert found.verdict is Class.crash, found.to_json()
    assert not any("has not moved" in item.text for item in found.evidence)


def test_a_crash_before_an_ordered_restart_and_one_after_it_are_no_loop(tmp_path: Path) -> None:
    ready = "[2026-03-02 10:01:05] Ready: configuration abc, invocation 1234"
    trace = TRACE.format(31, "TypeError: 7 is not it")
    crashed = (STARTED, ready, DECODE, trace, EXIT, AGAIN.format(1), ready, DECODE)
    other = "[opsctl] Started s: main process 8, invocation cd."
    found = judged(tmp_path, *crashed, "[opsctl] Stopping.", "[opsctl] Stopped.", other, ready, DECODE, trace, EXIT)
    assert found.verdict is Class.crash, found.to_json()
