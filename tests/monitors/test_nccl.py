"""NCCL's own word, taken live: recorders behind their pipes and RAS on its port, of processes whose titles hide their
environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitors import casefolder, engines, fleet
from monitors.capture import nccl
from monitors.capture.field import Field
from monitors.capture.manifest import Writer, verify
from monitors.capture.probes import PROBES
from monitors.remote import Remote
from tests.monitors.cluster import HERE, ROOT
from tests.ports import free_port

REMOTE = Remote(fleet.Node(name="a"))
FLEET = """[deployment.big]
engine = "vllm"
api = "http://127.0.0.1:9"
[[deployment.big.node]]
name = "a"
[[deployment.big.node.service]]
unit = "big.service"
ranks = [0, 1]
"""


@pytest.fixture(params=["json", "text"])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """Two ranks below a launcher that has the environment; their pids by rank."""
    port = free_port()
    while port % 2 != (request.param == "text"):
        port = free_port()
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF" + bytes(60))
    pipe, target = f"{tmp_path}/fr_pipe_", f"{tmp_path}/dump_"
    Path(f"{target}0").write_bytes(b"an older dump.")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": pipe, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": target,
           "NCCL_RAS_ADDR": f"127.0.0.1:{port}"}  # fmt: skip
    start = (
        "import subprocess as p, sys; c = [p.Popen([sys.executable, sys.argv[1], r, *sys.argv[2:]], stdout=p.PIPE) for r in '01'];"
        "[one.stdout.readline() for one in c]; print(*(one.pid for one in c), flush=True); [one.wait() for one in c]"
    )
    argv = [sys.executable, "-c", start, str(HERE / "nccl_rank.py"), pipe, target, str(port), str(tmp_path / "libnccl.so.2")]
    launcher = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdin is not None
    try:
        yield {str(rank): int(pid) for rank, pid in enumerate(launcher.stdout.readline().split())}
    finally:
        launcher.stdin.close()  # which ends the ranks, and they it
        launcher.wait(10)
        launcher.stdout.close()


def test_recorders_and_ras_reach_the_bundle_and_name_the_rank_that_did_not_come(ranks: dict[str, int], tmp_path: Path) -> None:
    whole = fleet.parse(FLEET, "fleet.toml")
    writer = Writer(tmp_path / "bundles", "big", "wedge")
    field = Field(whole.one(), engines.load("vllm"), {"a": REMOTE}, writer, {}, 0.0, pids={"a": dict(ranks)})
    next(probe for probe in PROBES if probe.name == "nccl").run(field, 14.0)
    writer.conclude("-")
    taken = {item.path: item.reason for item in writer.items if item.outcome == "taken"}
    assert set(taken) == {"fr-0.bin", "fr-1.bin", "ncclras.a.txt"}, writer.items
    assert "after it was asked for" in taken["fr-0.bin"] and taken["ncclras.a.txt"].startswith("127.0.0.1:")
    assert verify(writer.folder).ok and b"older" not in (writer.folder / "fr-0.bin").read_bytes()
    scene = casefolder.read(writer.folder)
    assert {(one.rank, one.seq) for one in scene.enqueued if one.source == "recorder"} == {(0, 41), (1, 40)}
    assert {(one.rank, one.seq) for one in scene.enqueued if one.source == "ras"} == {(0, 41), (1, 40)}
    verdict = casefolder.judge(writer.folder)
    assert verdict.verdict == "hang_tp_desync" and "rank 1" in verdict.suspects[0], verdict.to_json()


def test_ranks_that_were_not_started_for_it_are_no_failure_and_a_dead_recorder_is_one(tmp_path: Path) -> None:
    me = {"0": os.getpid()}
    recorder = (nccl.flight(REMOTE, me, deadline_s=3).value or {})["0"]
    assert recorder["enabled"] is False and "no NCCL loaded" in recorder["reason"]
    said = nccl.ras(REMOTE, me, deadline_s=3).value
    assert said is not None and said["enabled"] is False and "has NCCL loaded" in said["reason"]
    os.mkfifo(tmp_path / "p_0.pipe")
    env = {**os.environ, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p_"}
    quiet = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env=env, stdin=subprocess.PIPE)
    try:
        recorder = (nccl.flight(REMOTE, {"0": quiet.pid}, deadline_s=3).value or {})["0"]
        assert recorder["enabled"] is True and "nobody listens" in recorder["reason"], json.dumps(recorder)
    finally:
        quiet.communicate(timeout=10)
