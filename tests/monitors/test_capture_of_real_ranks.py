"""Bundles of real processes that stand still in each way, judged by the same code that judges a recorded case."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from monitors import casefolder
from monitors.capture import bundle
from tests.monitors.cluster import HEALTHY, Cluster, small_fleet, until, web


@pytest.mark.parametrize(
    ("mode", "expected", "suspect"),
    [
        ("grammar", "hang_grammar_barrier", "rank 0"),
        ("symmetric", "hang_symmetric_spin", ""),
        ("mismatch", "hang_symmetric_spin", "rank 1"),
        ("skip", "hang_tp_desync", "rank 1"),
        ("callback", "hang_host_callback", "rank 1"),
        ("control", "hang_control_plane", ""),
        ("stop", "hang_stopped", "rank 1"),
    ],
)
def test_a_wedge_of_real_ranks_gets_its_class_and_its_suspect(tmp_path: Path, mode: str, expected: str, suspect: str) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.wedge(mode)
        seen = {"state": "stalled", "stalled_s": 45.0, "held": 2}
        taken = bundle.capture(small_fleet(cluster, server.url).one(), root=tmp_path / "bundles", progress=seen)
        assert taken.verdict.verdict == expected, taken.verdict.to_json()
        assert taken.verdict.confidence >= 0.6
        assert any(suspect in who for who in taken.verdict.suspects) if suspect else True
        assert bundle.verify(taken.folder).ok
        names = {path.name for path in taken.folder.iterdir()}
        assert {
            "rank-0.box",
            "rank-1.box",
            "rank-2.box",
            "pyspy-0.json",
            "pyspy-1.json",
            "pyspy-2.json",
            "pyspy-0.t3.json",
            "ps.txt",
        } <= names
        assert {"gpu.csv", "metrics.txt", "health.txt", "server.log", "manifest.json", "clocks.json", "verdict.json"} <= names
        assert "simulated" in (taken.folder / "gpu.csv").read_text()
        if mode == "stop":
            assert any("stopped" in item.text for item in taken.verdict.evidence)
        for rank, process in enumerate(cluster.ranks):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert (state == "T") == (mode == "stop" and rank == 1), "the capture leaves each process as it found it"


def test_a_working_server_captured_on_demand_is_healthy_and_a_resting_one_idle(tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        deployment = small_fleet(cluster, server.url).one()
        cluster.work()
        assert bundle.capture(deployment, root=tmp_path / "bundles").verdict.verdict == "healthy"
        cluster.tell("idle")
        until(lambda: all(box.host.held == 0 for box in cluster.boxes()), "nothing is held")
        assert bundle.capture(deployment, root=tmp_path / "bundles").verdict.verdict == "idle_not_hung"


def test_a_short_budget_lists_what_did_not_fit_and_keeps_the_cheap_evidence(tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.wedge("symmetric")
        taken = bundle.capture(small_fleet(cluster, server.url).one(), root=tmp_path / "bundles", budget_s=0.4)
        outcomes = {item.probe: item.outcome for item in taken.items}
        assert outcomes["black_box"] == "taken"
        assert outcomes["stacks_again"] == "skipped"
        assert any("budget" in gap.reason for gap in taken.gaps)
        assert any(missing.what.startswith("stacks_again") for missing in taken.verdict.missing)


def test_the_same_bundle_read_again_gives_the_same_verdict_without_any_case_file(tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.wedge("skip")
        taken = bundle.capture(small_fleet(cluster, server.url).one(), root=tmp_path / "bundles", progress={"stalled_s": 9.0})
        (taken.folder / "case.yaml").write_text("verdict: healthy\n")
        again = casefolder.judge(taken.folder)
        assert again.verdict == taken.verdict.verdict == "hang_tp_desync"
        assert json.loads((taken.folder / "manifest.json").read_text())["verdict"] == "hang_tp_desync"


def test_a_dead_rank_is_a_crash_even_behind_a_good_health_answer(tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.work()
        os.kill(cluster.ranks[1].pid, signal.SIGKILL)
        cluster.ranks[1].wait(10)
        seen = {"state": "ended", "ended": True, "ends": 1}
        taken = bundle.capture(small_fleet(cluster, server.url).one(), root=tmp_path / "bundles", progress=seen)
        assert taken.verdict.verdict == "crash", taken.verdict.to_json()
        assert any("rank 1" in who for who in taken.verdict.suspects)
