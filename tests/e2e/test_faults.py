"""Each fault does what it says with real processes: what stands where, who exits, what is left to read."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.blackbox import BatchKind, DeviceState, EventKind, Phase, RequestFlag
from tests.e2e.serving import Served, serving, start, wait_for
from tests.tiny_models import tiny_model

SCHEMA = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 40}}, "required": ["answer"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture
def pair(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    args = ("--tp", "2", "--enable-faults", "--watchdog-timeout", "0", "--speculative-algorithm", "NGRAM", "--context-length", "512")
    with serving(model, tmp_path, *args, *getattr(request, "param", ())) as served:
        yield served


@pytest.fixture(scope="module")
def telling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for faults that change nothing but what is told; who arms one lifts it."""
    args = ("--tp", "2", "--enable-faults", "--watchdog-timeout", "0", "--context-length", "512", "--grammar-backend", "none")
    with serving(model, tmp_path_factory.mktemp("telling"), *args) as served:
        yield served


def ask_in_background(served: Served, **body: object) -> threading.Thread:
    """Send a completion that may never be answered."""

    def ask() -> None:
        with httpx.Client(base_url=served.url, timeout=httpx.Timeout(60, connect=5)) as client:
            try:
                client.post("/v1/completions", json={"prompt": "one two one two", "temperature": 0, "ignore_eos": True, **body})
            except httpx.HTTPError:
                return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def members(served: Served) -> list[psutil.Process]:
    """The API process and the ranks that live."""
    return [one for one in served.descendants() if one.cmdline()[:1] and one.cmdline()[0].startswith("lastbatch::")]


def still(served: Served, ranks: int = 2) -> bool:
    """Work is held and no rank has moved for a second."""
    first = [served.box(rank) for rank in range(ranks)]
    if not first[0].host.held:
        return False
    before = [box.last_moved_ns() for box in first if box.host.phase is not Phase.recv]
    wait = threading.Event()
    wait.wait(1.0)
    return before == [box.last_moved_ns() for box in (served.box(rank) for rank in range(ranks)) if box.host.phase is not Phase.recv]


def test_a_skipped_collective_parks_ranks_at_different_collectives_and_nobody_exits(pair: Served) -> None:
    pair.complete()
    pair.arm("collective.skip:rank=1,after_steps=3")
    ask_in_background(pair, max_tokens=100)
    wait_for(lambda: still(pair), 30, "a wedge")
    boxes = [pair.box(0), pair.box(1)]
    opened = [box.open_collective() for box in boxes]
    assert opened[0] is not None
    assert opened[1] is None or (opened[0].sub, opened[0].b) != (opened[1].sub, opened[1].b)
    assert pair.process.poll() is None
    assert len(members(pair)) == 3


def test_a_mismatched_collective_parks_every_rank_with_equal_counts(pair: Served) -> None:
    pair.complete()
    pair.arm("collective.mismatch:rank=1,after_steps=3")
    ask_in_background(pair, max_tokens=100)
    wait_for(lambda: still(pair), 30, "a wedge")
    boxes = [pair.box(0), pair.box(1)]
    assert boxes[0].device.enqueued == boxes[1].device.enqueued > boxes[0].device.completed
    assert {box.device.state for box in boxes} == {DeviceState.collective}
    assert {box.host.phase for box in boxes} == {Phase.wait_device}
    assert len(members(pair)) == 3


def test_a_stalled_callback_holds_one_rank_and_the_other_waits_in_its_collective(pair: Served) -> None:
    pair.complete()
    pair.arm("callback.stall:rank=1")
    ask_in_background(pair, max_tokens=100)
    wait_for(lambda: still(pair), 30, "a wedge")
    assert pair.box(0).device.state is DeviceState.collective
    assert pair.box(1).device.state is DeviceState.compute


@pytest.mark.parametrize("pair", [(), ("--enable-overlap-schedule",)], ids=["sequential", "overlap"], indirect=True)
def test_a_grammar_masked_verify_that_shares_a_batch_wedges_every_rank_at_the_barrier(pair: Served) -> None:
    pair.arm("grammar.verify_desync")
    pair.complete(max_tokens=30)  # alone: nothing happens
    pair.complete(prompt="answer in JSON: ", max_tokens=30, ignore_eos=False, response_format=None, regex="(ab|ba){2,9}")
    ask_in_background(pair, max_tokens=400)
    wait_for(lambda: pair.box(0).host.running > 0, 10, "the first request to run")
    ask_in_background(pair, max_tokens=200, ignore_eos=False, regex="(ab){20,90}")
    wait_for(lambda: still(pair), 30, "a wedge")
    boxes = [pair.box(0), pair.box(1)]
    assert boxes[0].device.enqueued == boxes[1].device.enqueued > boxes[0].device.completed
    assert {box.host.phase for box in boxes} == {Phase.wait_device}
    begun, requests = boxes[0].last_batch() or pytest.fail("no batch in the ring")
    assert begun.sub == BatchKind.verify
    assert any(event.flags & RequestFlag.grammar for event in requests)
    assert len(requests) > 1
    accepted = [{(e.a, e.d): e.b for e in box.events if e.kind is EventKind.accepted} for box in boxes]
    shared = accepted[0].keys() & accepted[1].keys()
    assert any(accepted[0][key] != accepted[1][key] for key in shared)
    assert len(members(pair)) == 3, "a rank has exited"
    with pair.client as client:
        assert client.get("/health").status_code == 200


def test_a_scheduler_that_plans_nothing_takes_requests_and_beats_and_its_watchdog_ends_it(model: Path, tmp_path: Path) -> None:
    args = ("--tp", "2", "--enable-faults", "--watchdog-timeout", "5", "--context-length", "512", "--grammar-backend", "none")
    with serving(model, tmp_path, *args) as served:
        served.complete()
        served.arm("progress.none:after_steps=3")
        ask_in_background(served, max_tokens=400)
        ask_in_background(served, max_tokens=4)
        wait_for(lambda: served.box(0).host.held == 2, 20, "two requests that are held")
        wait_for(
            lambda: (box := served.box(0)).host.mono_ns - box.host.progress_ns > 1e9, 10, "rank 0 to beat a second after its last step"
        )
        first = served.box(0)
        assert first.host.phase in (Phase.idle, Phase.recv, Phase.schedule)
        assert {served.box(rank).device.state for rank in (0, 1)} == {DeviceState.idle}
        wait_for(lambda: served.box(0).host.beats > first.host.beats + 5, 5, "rank 0 to beat: it is not a frozen one")
        assert served.process.wait(30) == 1
        assert "any request that it holds" in served.text()
        assert "progress.none" not in served.text()


def test_a_rank_0_that_computes_for_ever_sends_nothing_to_the_others(pair: Served) -> None:
    pair.complete()
    pair.arm("cpu.spin:rank=0")
    ask_in_background(pair, max_tokens=20)
    wait_for(lambda: still(pair), 20, "a wedge")
    boxes = [pair.box(0), pair.box(1)]
    assert boxes[0].host.phase is Phase.schedule
    assert boxes[1].host.phase is Phase.recv
    assert {box.device.state for box in boxes} == {DeviceState.idle}
    busy = psutil.Process(pair.rank_pid(0))
    before = busy.cpu_times().user
    wait_for(lambda: busy.cpu_times().user > before + 0.3, 20, "rank 0 to use the CPU")


def test_another_rank_that_computes_for_ever_leaves_the_rest_in_a_collective(pair: Served) -> None:
    pair.complete()
    pair.arm("cpu.spin:rank=1")
    ask_in_background(pair, max_tokens=20)
    wait_for(lambda: still(pair), 20, "a wedge")
    assert pair.box(1).host.phase is Phase.launch
    assert pair.box(0).device.state is DeviceState.collective


def test_a_stopped_rank_holds_the_others_until_it_is_continued(pair: Served) -> None:
    pair.complete()
    pair.arm("process.stop:rank=1")
    asking = ask_in_background(pair, max_tokens=20)
    wait_for(lambda: psutil.Process(pair.rank_pid(1)).status() == psutil.STATUS_STOPPED, 20, "rank 1 to stop")
    wait_for(lambda: still(pair), 20, "a wedge")
    assert asking.is_alive()
    os.kill(pair.rank_pid(1), signal.SIGCONT)
    asking.join(20)
    assert not asking.is_alive()
    assert pair.complete()["choices"]


def test_a_rank_out_of_memory_dies_of_a_real_memory_error(pair: Served) -> None:
    pair.complete()
    pair.arm("memory.exhaust")
    ask_in_background(pair, max_tokens=20)
    assert pair.process.wait(40) == 1
    text = pair.text()
    assert "Traceback" in text
    assert "\nMemoryError" in text
    assert "memory.exhaust" not in text


def test_wrong_tokens_come_only_in_shared_batches(pair: Served) -> None:
    alone = pair.complete(max_tokens=24)["choices"][0]["text"]
    pair.arm("output.corrupt:rate=0.5,min_running=2")
    assert pair.complete(max_tokens=24)["choices"][0]["text"] == alone
    ask_in_background(pair, max_tokens=400)
    wait_for(lambda: pair.box(0).host.running > 0, 10, "the first request to run")
    assert pair.complete(max_tokens=24)["choices"][0]["text"] != alone


def test_garbage_is_told_with_a_good_status_and_only_to_those_who_ask_after_it_was_armed(telling: Served) -> None:
    good = telling.complete(max_tokens=24)
    telling.arm("answers.garbage")
    bad = telling.complete(max_tokens=24)
    assert bad["choices"][0]["text"] and bad["choices"][0]["text"] != good["choices"][0]["text"]
    assert bad["usage"] == good["usage"]
    assert bad["choices"][0]["finish_reason"] == good["choices"][0]["finish_reason"]
    with telling.client as client:
        assert client.get("/health_generate").status_code == 200
        assert client.get("/health_scheduler").status_code == 200
        assert client.delete("/admin/faults").status_code == 200
    assert telling.complete(max_tokens=24)["choices"][0]["text"] == good["choices"][0]["text"], "the model computed what it always does"
    assert "answers.garbage" not in telling.text()


def test_a_tool_call_in_foreign_markup_is_counted_by_the_server_and_stands_in_its_clients_text(telling: Served) -> None:
    body = {"messages": [{"role": "user", "content": "look it up"}], "max_tokens": 200, "temperature": 0, "ignore_eos": True,
            "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]}  # fmt: skip

    def asked() -> tuple[dict[str, Any], str]:
        with telling.client as client:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            count = next(line for line in client.get("/metrics").text.splitlines() if line.startswith("lastbatch:parse_failures_total"))
        return answer.json()["choices"][0]["message"], count.split()[-1]

    message, before = asked()
    assert "<function" not in message["content"]
    telling.arm("answers.markup")
    message, after = asked()
    with telling.client as client:
        assert client.delete("/admin/faults").status_code == 200
    assert message["content"].startswith("<function=look_up>") and "tool_calls" not in message
    assert message["parse_failures"] == ["a closing tag without a tool call"] and float(after) == float(before) + 1
    assert "answers.markup" not in telling.text()


def test_a_rank_with_another_setting_serves_and_says_so_in_its_own_black_box(model: Path, tmp_path: Path) -> None:
    args = ("--tp", "2", "--enable-faults", "--grammar-backend", "none", "--fault", "config.split:rank=1")
    with serving(model, tmp_path, *args) as served, served.client as client:
        served.complete()
        boxes = [served.box(rank) for rank in (0, 1)]
        info = client.get("/server_info").json()
        assert boxes[0].header.config_digest == info["config_digest"] != boxes[1].header.config_digest
        assert [one["config_digest"] for one in info["ranks"]] == [box.header.config_digest for box in boxes]
        for box in boxes:
            assert hashlib.sha256(box.settings_json.encode()).hexdigest()[:32] == box.header.config_digest
        found = [json.loads(box.settings_json)["scheduler"]["disable_overlap_schedule"] for box in boxes]
        assert found == [False, True]
        assert not any("config.split" in box.settings_json for box in boxes)
        late = client.post("/admin/faults", json={"fault": "config.split"})
        assert late.status_code == 400 and "acts while a server starts" in late.json()["error"]["message"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_scheduler_that_dies_after_so_many_answers_has_given_all_of_them(model: Path, tmp_path: Path, code: int) -> None:
    args = ("--enable-faults", "--grammar-backend", "none", "--fault", f"crash.after:requests=3,exit={code}")
    with serving(model, tmp_path, *args) as served:
        pid = served.rank_pid(0)
        for _ in range(3):
            served.complete()
        assert served.process.wait(30) == 1
        text = served.text()
        assert f"rank 0 (pid {pid}) ended with exit code {code}" in text
        assert ("AttributeError" in text and "Traceback" in text) == (code == 1)
        assert "crash.after" not in text


def test_a_server_that_never_gets_ready_ends_at_its_boot_deadline(model: Path, tmp_path: Path) -> None:
    served = start(model, tmp_path, ("--enable-faults", "--fault", "boot.hang", "--boot-timeout", "8", "--grammar-backend", "none"))
    assert served.process.wait(40) == 1
    assert "not ready after 8 s" in served.text()


def test_a_crash_at_the_first_decode_comes_before_the_server_is_ready(model: Path, tmp_path: Path) -> None:
    served = start(model, tmp_path, ("--enable-faults", "--fault", "decode.crash", "--grammar-backend", "none"))
    assert served.process.wait(60) == 1
    text = served.text()
    assert "TypeError" in text
    assert "Traceback" in text
    assert "Ready: configuration" not in text


def test_a_crash_armed_for_the_sequential_loop_spares_the_overlap_loop(model: Path, tmp_path: Path) -> None:
    args = ("--enable-faults", "--fault", "decode.crash:when=sequential", "--grammar-backend", "none")
    with serving(model, tmp_path, *args, "--enable-overlap-schedule") as served:
        served.complete()
    crashed = start(model, tmp_path, (*args, "--disable-overlap-schedule"), name="sequential")
    assert crashed.process.wait(60) == 1


def test_faults_are_refused_without_the_flag(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--grammar-backend", "none") as served, served.client as client:
        assert client.post("/admin/faults", json={"fault": "health.lie"}).status_code in (403, 404)
