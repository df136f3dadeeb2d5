"""The replayed day on its two systemd nodes, with a small random model: steps alone, and what a killed replay leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opsctl.staging import nodes
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.nodes, pytest.mark.slow]
COMMAND = (sys.executable, "-m", "opsctl.cli", "drill", "run", "incident-2026-09-27")


@pytest.fixture(autouse=True)
def _nodes_can_be_booted() -> None:
    if why := nodes.missing(ssh=True):
        pytest.skip(why)


def model(folder: Path) -> str:
    made = tiny_model(folder / "tiny", layers=2, heads=6, kv_heads=3, hidden=96, dtype="bfloat16", max_position_embeddings=8192)
    return str(made)


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True, timeout=10).stdout


def test_the_wedge_alone_is_replayed_and_captured_from_both_nodes(tmp_path: Path) -> None:
    command = [*COMMAND, "--only", "capture", "--model", model(tmp_path), "--json"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    data = json.loads(done.stdout)["data"]
    assert [one["step"] for one in data["outcomes"]] == ["wedge", "capture"]
    assert data["outcomes"][1]["facts"]["verdict"] == "hang_grammar_barrier"
    assert {path.name for path in Path(data["folder"], "log").iterdir()} >= {"node-a.log", "node-b.log", "opsctl.log"}


def test_a_replay_that_is_killed_leaves_no_node_no_namespace_and_no_process(tmp_path: Path) -> None:
    command = [*COMMAND, "--only", "wedge", "--model", model(tmp_path)]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    ) as opsctl:
        prefix = f"lbr{opsctl.pid}"
        assert opsctl.stderr is not None
        assert any("both units are active" in line for line in opsctl.stderr)
        assert f"{prefix}-ctl" in namespaces()
        opsctl.kill()
    until = time.monotonic() + 60
    while prefix in namespaces() or _left(prefix):
        assert time.monotonic() < until, (namespaces(), _left(prefix))
        time.sleep(0.2)


def _left(prefix: str) -> str:
    return subprocess.run(["pgrep", "-af", prefix], capture_output=True, text=True, check=False, timeout=10).stdout
