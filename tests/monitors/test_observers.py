"""Observers on real files, processes and pages: a value, or the reason why there is none."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monitors import engines, fleet, page
from monitors.capture.redact import redact
from monitors.engines import Dialect
from monitors.judge.scene import Thread
from monitors.judge.stands import Standing, stand_of
from monitors.observe import batchlog, journal, logfile, metrics, probe, process, rundir, stacks
from monitors.remote import Remote
from tests.monitors.cluster import until, web

SGLANG = engines.load("sglang")
VLLM = engines.load("vllm")


def here() -> Remote:
    return Remote(fleet.Node(name="a"))


_V1 = "(APIServer pid=1) INFO 04-28 22:54:32 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
_V0 = "\x1b[32mINFO\x1b[0m 10-27 20:44:35 llm_engine.py:624] Avg prompt throughput: 1.0 tokens/s, "
_COMMA = "[2026-01-01 05:41:16 TP0] Decode batch, #running-req: 2, #token: 119, token usage: 0.45, accept len: 3.65, "
_NUMBERED = "[2026-01-01 05:41:16 DP1 TP0] Decode batch [7], #running-req: 3, #token: 9, token usage: 0.1, "
_DOT = "[05:41:16 TP0] Decode batch. #running-req: 4, #token: 1, token usage: 0.0, "


@pytest.mark.parametrize(
    ("dialect", "line", "running", "waiting", "progress"),
    [
        (SGLANG, _COMMA + "cuda graph: True, gen throughput (token/s): 169.53, #queue-req: 1", 2, 1, True),
        (SGLANG, _NUMBERED + "gen throughput (token/s): nan, #queue-req: 0, ", 3, 0, True),
        (SGLANG, _DOT + "gen throughput (token/s): 1.0, #queue-req: 2", 4, 2, True),
        (VLLM, _V1 + "Avg generation throughput: 0.0 tokens/s, Running: 3 reqs, Waiting: 1 reqs, GPU KV cache usage: 0.1%", 3, 1, False),
        (VLLM, _V0 + "Avg generation throughput: 2.0 tokens/s, Running: 2 reqs, Swapped: 0 reqs, Pending: 20 reqs, x: 1%", 2, 20, True),
    ],
)
def test_batch_lines_of_each_engine_are_read(dialect: Dialect, line: str, running: int, waiting: int, progress: bool) -> None:
    log = batchlog.read_text(line.encode(), dialect, "server.log")
    (found,) = log.batches
    assert (found.running, found.waiting, found.progress) == (running, waiting, progress)


def test_any_bytes_are_a_log_and_never_an_error() -> None:
    data = b"\xff\x00\n[2026-01-01 00:00:00 TP0] Decode batch, #running-req: \nTraceback (most recent call last):\n  File\rx\n\n" * 50
    assert batchlog.read_text(data, SGLANG, "x").lines == 250
    assert batchlog.read_journal(b'{"MESSAGE": [104, 105]}\n{"MESSAGE": null}\n{cut\n[1]\n', SGLANG, "j").lines == 2


def test_tracebacks_of_two_processes_that_interleave_are_kept_apart() -> None:
    head = "Traceback (most recent call last):"
    records = [("1", head), ("2", head), ("1", '  File "a.py", line 1, in f'), ("2", '  File "b.py", line 2, in g')]
    records += [("1", "ValueError: one"), ("2", "KeyError: 'two'")]
    data = "\n".join(json.dumps({"MESSAGE": text, "_PID": pid}) for pid, text in records).encode()
    found = batchlog.read_journal(data, SGLANG, "j").tracebacks
    assert {(t.kind, t.message) for t in found} == {("ValueError", "one"), ("KeyError", "'two'")}
    assert all("a.py" in t.text for t in found if t.kind == "ValueError")


def test_a_log_file_is_followed_through_rotation_truncation_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("old 1\nold 2\n")
    with here() as remote:
        follower = logfile.Follower(str(path), remote)
        assert follower.poll().value == ["old 1", "old 2"]
        with path.open("a") as file:
            file.write("new 1\nhal")
        assert follower.poll().value == ["new 1"]
        with path.open("a") as file:
            file.write("f\n")
        assert follower.poll().value == ["half"]
        path.rename(tmp_path / "server.log.1")
        assert "No such file" in follower.poll().reason
        path.write_text("after rotation\n")
        assert follower.poll().value == ["after rotation"]
        with path.open("w") as file:
            file.write("cut\n")
        assert follower.poll().value == ["cut"]
        with path.open("wb") as file:
            file.write(b"\xff\xfe\n")
        assert follower.poll().value == ["\ufffd\ufffd"]


def test_a_journal_reader_that_ends_is_a_gap_and_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The edge that a test machine may lack: a journalctl that speaks its JSON, named fake.
    fake = tmp_path / "journalctl"
    record = {"MESSAGE": "hello", "_SYSTEMD_INVOCATION_ID": "ab", "_PID": "7", "__CURSOR": "c1"}
    again = 'case "$*" in *--after-cursor*) sleep 30;; esac'
    fake.write_text(f"#!/bin/sh\necho '{json.dumps(record)}'\n{again}\necho broken >&2\nexit 4\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with here() as remote:
        reader = journal.Command("x.service", remote)
        try:
            seen: list[batchlog.Entry] = []
            reasons: list[str] = []

            def poll() -> bool:
                reading = reader.poll()
                seen.extend(reading.value or [])
                reasons.append(reading.reason)
                return len(seen) >= 2

            until(poll, "a record before and one after the restart")
            assert {(e.text, e.invocation, e.pid) for e in seen} == {("hello", "ab", "7")}
            assert any("ended with status 4: broken" in reason for reason in reasons)
        finally:
            reader.close()


def test_metrics_are_summed_over_labels_and_absent_ones_are_none() -> None:
    text = '# HELP x\nvllm:num_requests_running{e="0"} 1\nvllm:num_requests_running{e="1"} 2.0\n'
    text += "vllm:generation_tokens_total 1.5e+03\nbad NaN\nworse"
    values = metrics.parse(text)
    assert metrics.held(values, VLLM) == 3 and metrics.progress(values, VLLM) == 1500
    assert metrics.held({}, VLLM) is None


def test_pages_that_do_not_answer_give_the_reason() -> None:
    with web({"/health": (503, "no")}) as server:
        assert probe.ask(server.url, "/health", deadline_s=5).status == 503
        assert "status 404" in metrics.fetch(f"{server.url}/metrics", deadline_s=5).reason
        gone = server.url
    assert probe.ask(gone, "/health", deadline_s=5).status == 0
    assert "refused" in metrics.fetch(f"{gone}/metrics", deadline_s=5).reason


def test_a_stopped_process_is_dumped_and_left_stopped_and_its_state_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time\ndef standing():\n    time.sleep(600)\nstanding()"])
    try:
        with here() as remote:

            def dump() -> Any:
                answer = (stacks.dump(remote, [child.pid], deadline_s=10).value or {})[child.pid]
                return answer.get("threads")

            dumped = stacks.from_json(json.dumps(until(dump, "a dump")), "0", "pyspy-0.json")
            assert dumped.main is not None and dumped.main.frames[0].function == "standing"
            child.send_signal(signal.SIGSTOP)

            def stopped() -> bool:
                rows = process.sample(remote, SGLANG, [child.pid], deadline_s=10).value or ()
                return [(row.pid, row.state) for row in rows] == [(child.pid, "T")]

            until(stopped, "state T")
            answer = stacks.dump(remote, [child.pid], deadline_s=10).value
            assert answer is not None and answer[child.pid]["state_after"] == "T" and not answer[child.pid]["continued"]
    finally:
        child.kill()
        child.wait()
    with here() as remote:
        gone = stacks.dump(remote, [child.pid], deadline_s=10).value
        assert gone is not None and "gone" in gone[child.pid]["reason"]
        (row,) = process.sample(remote, SGLANG, [child.pid], deadline_s=10).value or ()
        assert row.state == "gone"


def test_a_dumper_that_stops_its_target_and_dies_leaves_it_running(tmp_path: Path) -> None:
    # py-spy killed in mid-pause is hard to time: a stand-in that stops the process and fails does it every time.
    dumper = tmp_path / "py-spy"
    dumper.write_text('#!/bin/sh\nfor last; do :; done\nkill -STOP "$last"\nexit 1\n')
    dumper.chmod(0o755)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with Remote(fleet.Node(name="a", py_spy=str(dumper))) as remote:
            answer = stacks.dump(remote, [child.pid], deadline_s=10).value
        assert answer is not None and answer[child.pid]["continued"] is True
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S", "the process runs on")
    finally:
        child.kill()
        child.wait()


def test_a_process_table_is_written_and_read_back() -> None:
    rows = [
        process.Process(5, 1, "D", "lastbatch::scheduler_TP1 cfg=ab", 3.5, "a", 1, "pipe_read"),
        process.Process(6, 1, "gone", "", None, "b"),
    ]
    again = process.from_text(process.to_text(rows), engines.load("lastbatch"), "ps.txt")
    assert [(r.pid, r.state, r.rank, r.node, r.wchan) for r in again] == [(5, "D", 1, "a", "pipe_read"), (6, "gone", None, "b", "")]


def test_a_run_directory_without_a_name_says_where_to_give_one() -> None:
    with here() as remote:
        found = rundir.find(remote, fleet.Service(unit="no-such-thing.service"), "embedded")
        assert "no run_dir in the fleet file" in found.reason
        assert rundir.find(remote, fleet.Service(unit="u", run_dir="/x"), "embedded").value == "/x"


FRAMES = {
    Standing.grammar_barrier: ["synchronize (torch/cuda/streams.py:2)", "Scheduler.advance_grammar_fsm (sglang/srt/x.py:3)"],
    Standing.collective: ["all_reduce (torch/distributed/distributed_c10d.py:2)", "forward (model.py:3)"],
    Standing.receive: ["broadcast (torch/distributed/distributed_c10d.py:2)", "Scheduler.recv_requests (sglang/srt/x.py:3)"],
    Standing.host_callback: ["preadv (tables.py:2)", "host_callback (tables.py:3)"],
    Standing.compile: ["0x7f (libLLVM-17.so)", "make_llir (triton/compiler/code.py:3)"],
    Standing.host: ["parse (json/decoder.py:3)"],
}


@pytest.mark.parametrize(("standing", "frames"), FRAMES.items())
def test_a_stack_means_what_its_marks_mean_together(standing: Standing, frames: list[str]) -> None:
    text = 'Process 1: sglang::scheduler_TP0\n\nThread 1 (idle): "MainThread"\n' + "".join(f"    {frame}\n" for frame in frames)
    (thread,) = stacks.from_text(text, "0", "pyspy-0.txt").threads
    assert isinstance(thread, Thread)
    assert stand_of(thread, SGLANG).standing is standing


def test_secrets_and_words_are_taken_out_and_numbers_stay() -> None:
    line = "[2026 TP0] Decode batch, #running-req: 2, #token: 119000, token usage: 0.45, gen throughput (token/s): 169.53"
    text = "\n".join([
        line,
        'POST with Authorization: Bearer abcdef123456 from bob@example.org',
        "argv: --api-key topsecret99 --tp 3 --hf-token hf_abcdefghijklmnopqrst",
        'Req(rid=7, prompt="my secret plan", input_ids=array(\'q\', [1, 2, 3]), n=1)',
        "key sk-abcdefghijklmnop1234 url http://user:pass@host/x",
    ])  # fmt: skip
    clean, ledger = redact(text, "server.log")
    assert clean.split("\n")[0] == line
    for secret in ("abcdef123456", "bob@", "topsecret99", "hf_abc", "secret plan", "1, 2, 3", "sk-abc", ":pass@"):
        assert secret not in clean
    assert "rid=7" in clean and "--tp 3" in clean
    assert {entry.line for entry in ledger} == {2, 3, 4, 5} and all(entry.size and entry.rule for entry in ledger)
    assert not any("secret" in json.dumps(entry.to_json()).replace("named-secret", "") for entry in ledger)


def test_a_page_reaches_a_real_receiver_and_hides_its_tokens_when_it_does_not() -> None:
    with web() as receiver:
        sent = page.send([f"json://127.0.0.1:{receiver.port}/"], "title", "body")
        assert sent.sent is True and receiver.posted[0]["message"] == "body"
    lost = page.send(["json://user:pass@127.0.0.1:9/token", "nonsense"], "t", "b")
    assert lost.sent is False and "127.0.0.1:9" in lost.reason and "pass" not in lost.reason and "token" not in lost.reason
    assert page.send([], "t", "b").sent is False
