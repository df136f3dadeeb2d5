"""Readers of evidence that other tools wrote: flight recorders, RAS, gdb, faulthandler, streams, tables."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from monitors import casefolder, engines
from monitors.judge import leak
from monitors.judge.stands import Standing, stand_of
from monitors.judge.verdict import Class
from monitors.observe import answers, clients, collectives, dumps, gpu, process, units

SGLANG, VLLM, GENERIC = (engines.load(name) for name in ("sglang", "vllm", "generic"))


def dump(*entries: tuple[int, str, str]) -> dict[str, object]:
    """A flight recorder's dump: (number, operation, state)."""
    return {
        "version": "2.4",
        "entries": [
            {
                "collective_seq_id": seq,
                "profiling_name": f"nccl:{op}",
                "state": state,
                "input_sizes": [[4, 8]],
                "process_group": ["0", "tp"],
            }
            for seq, op, state in entries
        ],
    }


def test_a_recorder_says_the_collective_in_which_its_rank_stands() -> None:
    raw = dump((7, "all_reduce", "completed"), (8, "all_gather", "started"), (9, "all_reduce", "scheduled"))
    for data in (json.dumps(raw).encode(), pickle.dumps(raw)):
        (found,) = collectives.recorder(data, "fr-2.json", 2)
        assert (found.rank, found.seq, found.op, found.state, found.completed, found.group) == (2, 8, "all_gather", "started", 7, "0")


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a dump must never run code",)


def test_a_recorder_that_is_cut_or_holds_code_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="only plain values"):
        collectives.recorder(pickle.dumps({"entries": [_Hostile()]}), "x", 0)
    for data in (pickle.dumps(dump((1, "x", "started")))[:-40], json.dumps(dump((1, "x", "started"))).encode()[:50], b"", b"\x80\x04\x95"):
        with pytest.raises(ValueError, match=r"."):
            collectives.recorder(data, "x", 0)
    with pytest.raises(ValueError, match="which rank"):
        collectives.recorder(json.dumps(dump((1, "x", "started"))).encode(), "x")


def test_ranks_that_only_run_ahead_are_no_desync_and_one_that_did_not_come_is(tmp_path: Path) -> None:
    for rank, last in ((0, 12), (1, 14)):
        entries = [(8, "all_reduce", "started"), *((n, "all_reduce", "scheduled") for n in range(9, last))]
        (tmp_path / f"fr-{rank}.json").write_text(json.dumps(dump(*entries)))
    ahead = casefolder.judge(tmp_path)
    assert ahead.verdict is not Class.hang_tp_desync
    (tmp_path / "fr-2.json").write_text(json.dumps(dump((6, "all_reduce", "completed"), (7, "broadcast", "started"))))
    behind = casefolder.judge(tmp_path)
    assert behind.verdict is Class.hang_tp_desync and any("rank 2" in who for who in behind.suspects), behind.to_json()


def test_a_rank_without_a_record_is_named_since_it_may_be_the_one(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"fr-{rank}.json").write_text(json.dumps(dump((8, "all_reduce", "started"))))
    gaps = casefolder.judge(tmp_path).missing
    assert any("rank 2" in gap.what and "did not come" in gap.reason for gap in gaps), gaps


def test_ras_in_json_is_compared_and_malformed_json_is_read_by_its_numbers() -> None:
    ranks = [{"rank": rank, "collective_counts": {"AllReduce": 900 - (rank == 2), "Broadcast": 3}, "status": {}} for rank in range(4)]
    text = json.dumps({"nccl_version": "x", "communicators": [{"hash": "5d1f", "ranks": ranks}]})
    found, note = collectives.ras(text, "ncclras.txt")
    assert {one.rank: one.seq for one in found} == {0: 903, 1: 903, 2: 902, 3: 903} and not note
    broken, note = collectives.ras(text.replace('"status": {}', '"status": {,}'), "ncclras.txt")
    assert {one.rank: one.seq for one in broken} == {0: 903, 1: 903, 2: 902, 3: 903} and "malformed" in note


def test_ras_that_hears_a_rank_no_more_or_reports_nothing_proves_no_health() -> None:
    assert "proves nothing" in collectives.ras("Communicators\n0 1 RUNNING OK\n", "x")[1]
    assert "silence" in collectives.ras("Errors\n#0-0 INCOMPLETE\n  Missing communicator data from 1 rank\n", "x")[1]


GDB = """Thread 7 (Thread 0x7f9356c7a000 (LWP 3271135) "executionLoop"):
#0  0x00007f9f12e0a85d in __lll_lock_wait () from /lib64/libpthread.so.0
Thread 1 (Thread 0x7ff5020 (LWP 7711) "worker"):
#0  0x0000ffffc0a1b2d4 in ?? () from /usr/lib/libcuda.so.1
#1  0x0000ffffc0b774ec in cuLaunchKernel () from /usr/lib/libcuda.so.1
#2  0x0000ffffc0b77500 in ns::Plugin<int>::enqueue(a const*, void* const*) () at src/plugin.cc:88
"""


def test_gdb_s_first_thread_is_the_main_one_and_its_frames_bear_marks() -> None:
    stack = dumps.from_gdb(GDB, "0", "gdb-0.txt")
    assert stack.main is not None and stack.main.tid == 7711 and [f.function for f in stack.main.frames][1] == "cuLaunchKernel"
    assert stand_of(stack.main, VLLM).standing is Standing.driver and stack.main.frames[2].line == 88


def test_faulthandler_s_last_thread_is_the_main_one() -> None:
    text = 'Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  File "a/threading.py", line 320 in wait\n\n'
    text += "Current thread 0x02 (most recent call first):\n"
    text += '  File "torch/cuda/streams.py", line 231 in synchronize\n  File "b.py", line 5 in loop\n'
    stack = dumps.from_faulthandler(text, "0", "x")
    assert stack.main is not None and stand_of(stack.main, SGLANG).standing is Standing.device_wait and len(stack.threads) == 2


def test_a_watchdog_s_dumps_in_a_log_are_stacks(tmp_path: Path) -> None:
    lines = ["[2026-03-02 10:00:00 TP0] Decode batch, #running-req: 1, #token: 5, token usage: 0.1, #queue-req: 0"]
    lines += ["[2026-03-02 10:06:00 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"]
    for rank in (0, 1):
        lines += [f"Process {90 + rank}: sglang::scheduler_TP{rank}", "Python v3.12.3", f'Thread {90 + rank} (active): "MainThread"']
        lines += ["    synchronize (torch/cuda/streams.py:231)", "    forward (model.py:3)", "    run_batch (scheduler.py:9)", ""]
    (tmp_path / "server.log").write_text("\n".join(lines))
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict is Class.hang_symmetric_spin and any("2 ranks stand at one place" in e.text for e in verdict.evidence)


MARKED = (
    "<\uff5cDSML\uff5ctool_calls>",
    "<\uff5cDSML\uff5c calls>",
    '<\uff5c\uff5cDSML\uff5c\uff5cparameter name="q">1',
    "<|DSML|invoke",
    "<\u2016DSML\u2016function_calls>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|im_end|>",
    "< |close| >",
    "<tool_call>\n{",
    "<function=get_weather>",
    "<minimax:tool_call>",
    "[TOOL_CALLS]",
    "answer</think> more",
)
CLEAN = (
    "plain text",
    "a | b | c",
    "if x < y and y > z",
    "The `<tool_call>` tag opens a call.",
    "```xml\n<\uff5cDSML\uff5cinvoke>\n```",
    "| col | col |\n|---|---|",
    "",
)


@pytest.mark.parametrize("text", MARKED)
def test_a_marker_is_found_in_every_spelling_and_wherever_a_stream_is_cut(text: str) -> None:
    assert leak.scan("so " + text) is not None
    for at in range(1, len(text)):
        chunks = [{"choices": [{"delta": {"content": part}}]} for part in ("so " + text[:at], text[at:])]
        joined = answers.from_sse("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "x")
        assert leak.scan(joined.texts["content"]) is not None


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_quoted_or_no_marker_is_no_leak(text: str) -> None:
    assert leak.scan(text) is None


def test_each_api_s_shape_is_joined_by_channel() -> None:
    responses = (
        'event: x\ndata: {"type":"response.output_text.delta","delta":"hel"}\n\ndata: {"type":"response.output_text.delta","delta":"lo"}\n'
    )
    assert answers.from_sse(responses, "x").texts == {"content": "hello"}
    messages = 'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}\n'
    assert answers.from_sse(messages, "x").texts == {"content": "hi"}
    body = {
        "choices": [
            {"message": {"reasoning_content": "r", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}
        ]
    }
    found = answers.from_json(json.dumps(body), "x")
    assert found.tool_calls == 1 and found.texts == {"reasoning": "r", "arguments": "{}f"}
    with pytest.raises(ValueError, match="no event"):
        answers.from_sse("<html>", "x")


def test_gpu_tables_of_parts_without_a_cap_and_of_other_makers() -> None:
    table = "|   0  NVIDIA GB10     On  |   0000000F:01:00.0 Off |    N/A |\n"
    table += "| N/A   41C    P0   13W /  N/A  | Not Supported          |     96%      Default |\n"
    (part,) = gpu.from_table(table, "x")
    assert (part.util, part.power_w, part.limit_w, part.spinning) == (96, 13, None, True)
    (other,) = gpu.from_csv("device, gpu_use_percent, average_power_w\n0, 100, 290\n", "x")
    assert other.working and not other.spinning


def test_process_tables_below_a_summary_and_the_kernel_s_status() -> None:
    top = "top - 10:00:00 up 3 days\n\n  PID USER PR NI VIRT RES SHR S %CPU %MEM TIME+ COMMAND\n"
    top += " 77 root 20 0 1g 1g 1m R 99.9 1.0 9:01 sglang::scheduler_TP1\n"
    (row,) = process.from_text(top, SGLANG, "top.txt")
    assert (row.pid, row.state, row.cpu_percent, row.rank) == (77, "R", 99.9, 1)
    status = process.from_status("Name:\tVLLM::Worker\nState:\tT (stopped)\nPid:\t5\n", VLLM, "proc-status.txt")
    assert (status.state, status.pid) == ("T", 5)


def test_what_clients_saw_is_read_from_lines_and_from_a_table() -> None:
    lines = "2026-03-02T10:00:00Z WARN upstream timed out after 120 s\n2026-03-02T10:00:01Z INFO 200 OK\nnothing\n"
    assert [one.what for one in clients.from_text(lines, "proxy.log")] == ["timeout", "ok"]
    assert [one.what for one in clients.from_text("qps,ok_before_hang\n2,77\n", "smoke.txt")] == ["timeout"]
    assert units.from_attempts("attempt,exit\n1,143\n2,0\n3,1\n", "x").values["FailedAttempts"] == "2"
    assert GENERIC.rank_of("nobody") is None


def test_a_health_file_that_also_holds_a_request_tells_both(tmp_path: Path) -> None:
    (tmp_path / "health.txt").write_text(
        "GET /health 200 0.003 s\nGET http://a:1/v1/models -> 200\nPOST /v1/completions timed out 120.0 s\n"
    )
    scene = casefolder.read(tmp_path)
    assert [(h.route, h.status, h.seconds) for h in scene.health] == [("/health", 200, 0.003), ("/v1/models", 200, 0.0)]
    assert casefolder.judge(tmp_path).verdict is Class.health_lies
