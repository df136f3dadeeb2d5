"""What many lines of one log say: of which start they are, and whether a silence had work in it."""

from __future__ import annotations

import pytest

from monitors import engines
from monitors.judge import trends
from monitors.judge.scene import Scene
from monitors.observe import batchlog

STARTED = "[opsctl] Started one: main process {}, invocation {}."
BATCH = "[2026-03-02 10:{:02}:00] Decode batch, #running-req: {}, #token: 9, token usage: 0.1, gen throughput (token/s): 5.0, #queue-req: 0"
READY = "[2026-03-02 10:00:30] The server is fired up and ready to roll!"
DONE = "[2026-03-02 10:02:30] req rid=abc caller=4b2c7fc2 shape=text prompt_sha=8f43 status=200 in=1 out=5 finish=length"
TRACE = ["Traceback (most recent call last):", '  File "a.py", line 1, in b', "ValueError: no"]


def read(*lines: str) -> Scene:
    dialect = engines.load("lastbatch")
    return Scene(dialect, logs=(batchlog.read_text("\n".join(lines).encode(), dialect, "server.log"),))


def silent(scene: Scene) -> bool:
    return "silence_ended" in {name for name, _ in trends.find(scene)}


def test_a_silence_with_work_in_it_that_ends_is_told() -> None:
    assert silent(read(STARTED.format(1, "a" * 32), READY, BATCH.format(1, 1), BATCH.format(2, 1), BATCH.format(9, 1)))


@pytest.mark.parametrize(
    "lines",
    [
        (BATCH.format(1, 1), STARTED.format(2, "b" * 32), BATCH.format(9, 1)),
        (BATCH.format(1, 1), READY, BATCH.format(9, 1)),
        (READY, BATCH.format(1, 1), DONE, BATCH.format(9, 1)),
    ],
    ids=["another start", "a warm-up", "what it held was answered"],
)
def test_a_rest_is_no_silence(lines: tuple[str, ...]) -> None:
    assert not silent(read(*lines))


def test_a_log_file_of_several_starts_tells_of_which_one_a_traceback_is() -> None:
    (log,) = read(*TRACE, STARTED.format(1, "a" * 32), *TRACE, STARTED.format(2, "b" * 32), READY).logs
    assert log.starts == ("a" * 32, "b" * 32)
    assert [one.invocation for one in log.tracebacks] == ["", "a" * 32]
    assert [notice.invocation for notice in log.notices if notice.kind == "ready"] == ["b" * 32]
