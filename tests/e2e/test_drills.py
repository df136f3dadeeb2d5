"""Three short drills in auto mode, on one server with a small random model: each runbook's own steps against its live fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import wait_for
from tests.tiny_models import tiny_model

COMMAND = (sys.executable, "-m", "opsctl.cli", "drill", "run")
DRILLS = {"drill-stopped": "hang_stopped", "drill-lying-health": "hang_control_plane", "drill-crash": "crash"}


def test_faults_are_found_captured_mended_by_their_runbooks_and_scored(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", layers=2, heads=6, kv_heads=3, hidden=96, dtype="bfloat16", max_position_embeddings=8192)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run([*COMMAND, *DRILLS, "--model", str(model), "--seed", "1", "--json"], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=600, env=env, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    scores = {score["drill"]: score for score in json.loads(done.stdout)["data"]}
    assert {name: score["verdicts"][0] for name, score in scores.items()} == DRILLS, scores
    for score in scores.values():
        moments = score["moments"]
        assert 0 < moments["detected"] < moments["mitigated"] <= moments["recovered"] + 10
        assert score["paged"] == 1 and score["fidelity"] == 1.0 and score["false_moves"] == []
        ran = [step for step in score["steps"] if step["outcome"] != "skipped"]
        assert len(ran) >= 3 and {step["outcome"] for step in ran} == {"passed"}
    kept = (tmp_path / "state" / "lastbatch" / "drills" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["drill"] for line in kept] == list(scores)


@pytest.mark.parametrize("said", ["booting the engine", pytest.param("inject: arm the fault", marks=pytest.mark.slow)])
def test_when_opsctl_is_killed_in_mid_drill_nothing_of_it_goes_on(tmp_path: Path, said: str) -> None:
    model = tiny_model(tmp_path / "tiny", layers=2, heads=6, kv_heads=3, hidden=96, dtype="bfloat16", max_position_embeddings=8192)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen([*COMMAND, "drill-stopped", "--model", str(model)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, env=env, text=True) as opsctl:  # fmt: skip
        assert opsctl.stderr is not None
        line = next(line for line in opsctl.stderr if said in line or "error" in line)
        assert said in line
        if said.startswith("booting"):
            wait_for(lambda: list((tmp_path / "state").glob("**/run/*/rank-*.box")), 60, "a rank")
        opsctl.kill()
    until = time.monotonic() + 60
    while left := _of(tmp_path):
        assert time.monotonic() < until, left
        time.sleep(0.2)


def _of(folder: Path) -> list[str]:
    """The processes that still belong to a drill of this state folder: ranks and services by their run directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"XDG_STATE_HOME={folder / 'state'}" in Path(f"/proc/{process.pid}/environ").read_text(errors="replace"):
                found.append(f"{process.pid} {process.name()}")
        except (OSError, psutil.NoSuchProcess):
            continue
    return found
