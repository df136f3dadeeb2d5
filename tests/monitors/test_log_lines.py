"""Log lines in whatever they arrive: read in UTC with what was assumed, or passed over, and never an exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitors import engines, fleet
from monitors.judge.moment import Moment
from monitors.observe import batchlog, stamps
from monitors.observe.envelope import unwrap
from monitors.observe.logfile import Follower
from monitors.remote import Remote

FORMATS = Path(__file__).parents[3] / "shared/formats"
DECODE = (
    "[2026-03-02 10:00:05 TP0 EP0] Decode batch, #running-req: 2, #token: 9, token usage: 0.1, gen throughput (token/s): 5.0, #queue-req: 1"
)
STATS = (
    "INFO 03-02 10:00:05 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 3.0 tokens/s, "
    "Running: 2 reqs, Waiting: 1 reqs, GPU KV cache usage: 1.0%"
)
ENVELOPES = {
    "plain": "{}",
    "colour": "\x1b[1;36m{}\x1b[0;0m",
    "colour as octal text": "#033[2m{}#033[0m",
    "colour without its escape": "[36m{}",
    "docker compose": "engine-1  | {}",
    "docker compose in brackets": "[engine]     | {}",
    "kubectl": "2026-03-02T09:00:05.108632509Z {}",
    "a container runtime": "2026-03-02T09:00:05.108632509+00:00 stdout F {}",
    "a log service": "2026-03-02T17:00:05+08:00\t{}",
    "journald": "Mar 02 10:00:06 host-a engine[8707]: {}",
    "journald without a host": "Mar 02 10:00:06 engine[8707]: {}",
    "ray": "(RayWorkerWrapper pid=4009, ip=192.0.2.9) {}",
    "a process": "(EngineCore_DP0 pid=23) {}",
    "a rank": "(VllmWorker rank=0 pid=23) {}",
    "behind a progress bar": "warm-up:  3%|#  | 5/99\rwarm-up:  6%|## | 9/99\r{}",
    "a carriage return": "{}\r",
}


@pytest.mark.parametrize("envelope", ENVELOPES, ids=ENVELOPES)
@pytest.mark.parametrize(("dialect", "line"), [("sglang", DECODE), ("vllm", STATS)])
def test_a_batch_line_is_read_in_every_envelope(dialect: str, line: str, envelope: str) -> None:
    log = batchlog.read_text((ENVELOPES[envelope].format(line) + "\n").encode(), engines.load(dialect), "x.log")
    (found,) = log.batches
    assert (found.running, found.waiting, found.progress) == (2, 1, True) and found.moment is not None


@pytest.mark.parametrize(
    "record",
    [
        {"log": DECODE + "\n", "stream": "stderr", "time": "2026-03-02T09:00:05.1Z"},
        {"timestamp": "2026-03-02T09:00:05Z", "level": "INFO", "fields": {"message": DECODE}},
        {"time": "2026-03-02T09:00:05Z", "rank": "TP0", "message": DECODE},
        {"msg": DECODE, "ts": 1772442005.1},
    ],
    ids=("docker", "tracing", "custom", "zap"),
)
def test_a_batch_line_is_read_out_of_json(record: dict[str, object]) -> None:
    (found,) = batchlog.read_text(json.dumps(record).encode(), engines.load("sglang"), "x.log").batches
    assert found.running == 2 and found.moment is not None and found.moment.zone


CUSTOM = (
    "[2026-03-02 10:00:05][scheduler_metrics_mixin.py:424][INFO]: Prefill batch, #new-seq: 1, #running-req: 0, #queue-req: 4",
    "2026-03-02 10:00:05,532 - sglang - INFO - [2026-03-02 10:00:05 TP0] Prefill batch. #new-seq: 1, #running-req: 0, #queue-req: 4",
    "[10:00:05 TP0] Prefill batch. #new-seq: 1, #new-token: 9, cache hit rate: 0.00%, #running-req: 0, #queue-req: 4",
    "new fill batch. #seq: 1. #cached_token: 478. #new_token: 254. #remaining_req: 4. #running_req: 0. tree_cache_hit_rate: 80.81%.",
    "[2026-03-02 10:00:05 DP1 TP3] Prefill batch [41], #new-seq: 1, #running-req: 0, #queue-req: 4, npu graph: False, ",
)


@pytest.mark.parametrize("line", CUSTOM, ids=range(len(CUSTOM)))
def test_the_forms_of_sglang_through_its_versions_and_logging_configurations(line: str) -> None:
    (found,) = batchlog.read_text(line.encode(), engines.load("sglang"), "x.log").batches
    assert (found.running, found.waiting) == (1, 4)


@pytest.mark.parametrize(
    "line",
    [
        "slot update_slots: id  0 | task 21549 | prompt processing progress, n_tokens = 99187, batch.n_tokens = 883, progress = 0.994825",
        "0.29.591.848 I slot print_timing: id  0 | task 0 | prompt processing, n_tokens =   4096, progress = 0.31",
        "[04/28/2025-09:56:44] [TRT-LLM] [I] iter = 198, global_rank = 0, rank = 0, num_scheduled_requests: 10, states = {'a': 0}",
        'I1218 03:35:37.688135 20559 libtensorrtllm.cc:1205] {"Active Request Count":1,"Context Requests":1,"Iteration Counter":7}',
        "[TM][INFO] ------------------------- step = 2490 -------------------------",
        "2023-12-22T00:21:24.202169Z  INFO generate{x=1}: text_generation_router::server: router/src/server.rs:289: Success",
    ],
    ids=("llama.cpp", "llama.cpp with uptime", "TensorRT-LLM", "TensorRT-LLM in C++", "LMDeploy", "TGI"),
)
def test_engines_known_by_their_log_lines_show_progress(line: str) -> None:
    (found,) = batchlog.read_text(line.encode(), engines.load("generic"), "x.log").batches
    assert found.progress


STAMPS = {
    "2026-03-02T10:00:05.5Z x": "2026-03-02 10:00:05 UTC",
    "2026-03-02T10:00:05+05:30 x": "2026-03-02 04:30:05 UTC",
    "[2026-03-02 10:00:05 TP0] x": "2026-03-02 10:00:05 UTC (zone assumed)",
    "2026-03-02 10:00:05,123 - a - INFO - x": "2026-03-02 10:00:05 UTC (zone assumed)",
    "[03/02/2026-10:00:05] [TRT-LLM] [I] x": "2026-03-02 10:00:05 UTC (zone assumed)",
    "INFO 03-02 10:00:05 [a.py:1] x": "03-02 10:00:05 UTC (zone assumed, year not given)",
    "[rank2]:[E302 10:00:05.1 a.cpp:6] x": "03-02 10:00:05 UTC (zone assumed, year not given)",
    "[rank2]:[E1002 10:00:05.1 a.cpp:6] x": "10-02 10:00:05 UTC (zone assumed, year not given)",
    "Mar  2 10:00:05 host a[1]: x": "03-02 10:00:05 UTC (zone assumed, year not given)",
    "[Mon Mar  2 10:00:05 2026] NVRM: x": "2026-03-02 10:00:05 UTC (zone assumed)",
    "[10:00:05 TP0] x": "10:00:05 UTC (zone assumed, date not given)",
    "INFO 02-30 10:00:05 x": "None",
    "no time here": "None",
}


@pytest.mark.parametrize("text", STAMPS, ids=STAMPS)
def test_a_time_is_utc_and_says_what_was_assumed(text: str) -> None:
    assert str(stamps.find(text)) == STAMPS[text]


def test_times_that_lack_different_parts_are_not_compared() -> None:
    known, local = Moment(1000.0), Moment(900.0, zone=False)
    assert known.since(local) is None and local.since(Moment(880.0, zone=False)) == 20.0
    assert Moment(10.0, date=False, year=False).since(Moment(86390.0, date=False, year=False)) == 20.0


def test_the_outer_time_speaks_where_it_alone_has_a_zone() -> None:
    (opened,) = unwrap("2026-03-02T17:00:05Z INFO 03-02 10:00:05 [client.py:193] x")
    assert opened.moment is not None and str(opened.moment) == "2026-03-02 17:00:05 UTC" and opened.body == "x"


def test_a_traceback_is_whole_behind_the_prefix_of_each_of_its_lines() -> None:
    prefix = "(EngineCore pid=111) ERROR 03-02 10:00:05 [core.py:1110] "
    lines = ("Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", "ValueError: no such page", "after")
    (found,) = batchlog.read_text("\n".join(prefix + line for line in lines).encode(), engines.load("vllm"), "x.log").tracebacks
    assert (found.kind, found.message) == ("ValueError", "no such page")
    assert found.text.splitlines() == list(lines[:4])
    whole = json.dumps({"message": "Scheduler hit an exception: " + "\n".join(lines[:4])})
    (again,) = batchlog.read_text(whole.encode(), engines.load("sglang"), "x.log").tracebacks
    assert (again.kind, again.message) == ("ValueError", "no such page")


def test_a_log_that_is_given_newest_first_is_turned_round() -> None:
    lines = [
        f"2026-03-02T10:00:0{i}Z\t{text}"
        for i, text in enumerate(("Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 1"))
    ]
    (found,) = batchlog.read_text("\n".join(reversed(lines)).encode(), engines.load("sglang"), "x.log").tracebacks
    assert found.kind == "KeyError"


def test_cut_lines_and_foreign_bytes_are_passed_over() -> None:
    data = DECODE.encode() + b"\n" + DECODE.encode()[:60] + b"\n\xff\xfeGPU 66\xb0C\n" + b'{"log": "cut\n' + DECODE.encode() + b"\n"
    log = batchlog.read_text(data, engines.load("sglang"), "x.log")
    assert [line.running for line in log.batches][::2] == [2, 2] and log.lines == 5


def test_every_line_of_the_format_samples_is_read_or_skipped() -> None:
    if not FORMATS.is_dir():
        pytest.skip("the format samples are not beside this checkout")
    batches: dict[str, int] = {}
    for path in sorted(FORMATS.glob("*.log")):
        for name in engines.names():
            log = batchlog.read_text(path.read_bytes(), engines.load(name), path.name)
            assert log.lines > 0
            batches[path.name] = max(batches.get(path.name, 0), len(log.batches))
    silent = sorted(name for name, count in batches.items() if count == 0)
    assert all(name.startswith(("nccl", "ray", "dynamo", "ollama", "wrap", "tgi")) for name in silent), silent


def test_a_progress_bar_that_never_ends_its_line_is_seen_to_move_and_fills_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"start\r\n")
    with Remote(fleet.Node(name="a")) as remote:
        follower = Follower(str(path), remote)
        assert [line.strip() for line in follower.poll().value or []] == ["start"]
        with path.open("ab") as file:
            file.write(b"warm-up:  3%\rwarm-up:  6%\rwarm-up:")
        assert follower.poll().value == ["warm-up:  6%"]
        with path.open("ab") as file:
            file.write(b"  9%\rwarm-up: 12%\n")
        assert [line.rsplit("\r", 1)[-1] for line in follower.poll().value or []] == ["warm-up: 12%"]
        with path.open("ab") as file:
            file.write(b"x" * 500_000)
        assert follower.poll().value == [] and len(follower._rest) <= 64 << 10


def test_a_line_end_of_two_characters_that_is_read_in_halves_is_one(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"one\n")
    with Remote(fleet.Node(name="a")) as remote:
        follower = Follower(str(path), remote)
        follower.poll()
        with path.open("ab") as file:
            file.write(b"two\r")
        assert follower.poll().value == []
        with path.open("ab") as file:
            file.write(b"\nthree\r\n")
        assert [line.rstrip() for line in follower.poll().value or []] == ["two", "three"]
