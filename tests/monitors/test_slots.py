"""Slots that leak while batches go on."""

from __future__ import annotations

import json
from pathlib import Path

from monitors import casefolder, engines
from monitors.judge.slots import Slots
from monitors.judge.verdict import Class
from monitors.observe.batchlog import batch_line

LINE = "[2026-03-01 10:{:02d}:{:02d}] Decode batch, #running-req: {}, #token: 900, token usage: 0.04, #transfer-req: {}, #prealloc-req: 0, gen throughput (token/s): {}, #queue-req: {}"  # noqa: E501


def after(rows: list[tuple[int, int, int]], every_s: float = 20.0) -> tuple[Slots, float]:
    """``rows``: running, in transfer, queued."""
    dialect, slots = engines.load("sglang"), Slots()
    for n, (running, transfer, queued) in enumerate(rows):
        line = batch_line(LINE.format(n // 60 % 60, n % 60, running, transfer, running * 40.0, queued), dialect)
        assert line is not None and line.values["#transfer-req"] == transfer
        slots = slots.take(line, n * every_s)
    return slots, (len(rows) - 1) * every_s


def test_transfers_that_never_arrive_while_less_and_less_runs_are_told(tmp_path: Path) -> None:
    slots, now = after([(30, 4, 0)] * 3 + [(max(1, 30 - n), 7, 2) for n in range(60)])
    text = slots.stuck(now)
    assert "#transfer-req stands at 7" in text and "where" in text
    (tmp_path / "progress.json").write_text(json.dumps({"slots": text}))
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict is Class.hang_kv_transfer and verdict.evidence[0].text == text


def test_transfers_that_come_and_go_are_none() -> None:
    slots, now = after([(2, 5 + n % 3, 9) for n in range(200)])
    assert not slots.stuck(now)


def test_a_count_that_stands_while_all_run_as_before_is_none() -> None:
    slots, now = after([(30, 7, 0)] * 100)
    assert not slots.stuck(now)


def test_a_short_standstill_is_none() -> None:
    slots, now = after([(30, 0, 0)] * 5 + [(3, 7, 0)] * 20)
    assert not slots.stuck(now)


def test_lines_without_progress_are_a_matter_of_stalls() -> None:
    dialect = engines.load("vllm")
    text = "INFO 03-01 10:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"  # noqa: E501
    line = batch_line(text, dialect)
    assert line is not None and Slots().take(line, 5.0) == Slots()
