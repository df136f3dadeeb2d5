"""What each health route says, and does not say, while the scheduler is loading, well, deaf, stale or dead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.engine.api_process import Api, api_process, write_box


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flags = ("--tp", "2", "--health-generate-timeout", "0.3", "--watchdog-timeout", "0.5")
    with api_process(tmp_path_factory.mktemp("api"), *flags) as api:
        yield api


@pytest.fixture
def healthy(api: Api) -> Iterator[Api]:
    """Both ranks have fresh boxes: 0 of this node, 1 a relayed copy whose pid means nothing here."""
    boxes = [write_box(api.run_directory, 0, api.settings), write_box(api.run_directory, 1, api.settings, pid=2**22 - 1, remote=True)]
    api.scheduler.script = api.scheduler.says("x")
    yield api
    api.scheduler.deaf = False
    for box in boxes:
        box.close(unlink=True)


def reasons(api: Api) -> list[str]:
    answer = api.client.get("/health_scheduler")
    body = answer.json()
    assert answer.status_code == (503 if body["reasons"] else 200)
    return list(body["reasons"])


def test_fresh_boxes_of_all_ranks_are_healthy(healthy: Api) -> None:
    assert reasons(healthy) == []
    ranks = healthy.client.get("/health_scheduler").json()["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {"phase", "step", "running", "waiting", "held", "record_age_s"} <= set(ranks[0])


def test_a_missing_rank_is_named(healthy: Api) -> None:
    (healthy.run_directory / "remote-rank-1.box").rename(healthy.run_directory / "away")
    try:
        (reason,) = reasons(healthy)
        assert reason.startswith("rank 1: no black box")
    finally:
        (healthy.run_directory / "away").rename(healthy.run_directory / "remote-rank-1.box")


@pytest.mark.parametrize("reaped", [True, False])
def test_a_dead_process_of_this_node_is_named(healthy: Api, reaped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        if reaped:
            dead.wait(10)
        else:  # its parent has not asked yet: the pid is still there, as a zombie
            os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        write_box(healthy.run_directory, 0, healthy.settings, pid=dead.pid).close()
        (reason,) = reasons(healthy)
        assert reason == f"rank 0: its process {dead.pid} is dead"


def test_a_stale_record_is_named_with_its_age_and_phase(tmp_path_factory: pytest.TempPathFactory) -> None:
    with api_process(tmp_path_factory.mktemp("stale"), "--health-max-age", "0.05") as stale:
        stale.scheduler.wait_for(lambda: bool(reasons(stale)), "the record to be old")
        (reason,) = reasons(stale)
        assert "in phase load; at most 0.05 s" in reason
        assert stale.client.get("/health").status_code == 200


def test_a_file_that_is_no_box_is_a_reason(healthy: Api) -> None:
    (healthy.run_directory / "rank-0.box").write_bytes(b"junk")
    (reason,) = reasons(healthy)
    assert "rank-0.box" in reason


def test_a_generating_probe_is_one_token_and_leaves_nothing(healthy: Api) -> None:
    assert healthy.client.get("/health_generate").status_code == 200
    probe = healthy.scheduler.requests[-1]
    assert (probe.probe, probe.sampling.max_tokens, probe.sampling.temperature) == (True, 1, 0.0)
    assert "lastbatch:in_flight_requests 0.0" in healthy.client.get("/metrics").text


def test_a_probe_without_an_answer_fails_by_its_deadline_and_is_aborted(healthy: Api) -> None:
    healthy.scheduler.script = healthy.scheduler.hangs_after("")
    answer = healthy.client.get("/health_generate")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["no token within 0.3 s"])
    rid = healthy.scheduler.requests[-1].rid
    healthy.scheduler.wait_for(lambda: rid in healthy.scheduler.aborted, "the probe's abort")
    assert healthy.client.get("/health").status_code == 200  # the process is well, and says no more than that


def test_a_probe_that_is_refused_fails_with_the_reason(healthy: Api) -> None:
    healthy.scheduler.script = healthy.scheduler.refuses(503, "the pool is gone")
    assert healthy.client.get("/health_generate").json()["reasons"] == ["the pool is gone"]


def test_a_scheduler_that_falls_silent_ends_waiting_requests_with_504(healthy: Api) -> None:
    healthy.scheduler.script = healthy.scheduler.hangs_after("a")
    answer = healthy.chat()
    healthy.refused(answer, 504, "scheduler_silent")
    rid = healthy.scheduler.requests[-1].rid
    healthy.scheduler.wait_for(lambda: rid in healthy.scheduler.aborted, "the abort")
    text = healthy.chat(stream=True).text
    assert '"scheduler_silent"' in text
    assert "[DONE]" not in text
