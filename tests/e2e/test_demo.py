"""``opsctl demo`` on a small random model: the whole road, read from its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import tiny_model


def test_the_incident_is_played_to_its_verified_end(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", layers=2, heads=6, kv_heads=3, hidden=96, dtype="bfloat16", max_position_embeddings=8192)
    done = subprocess.run(
        [sys.executable, "-m", "opsctl.cli", "demo", "--model", str(model), "--json"], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=300, env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    data = json.loads(done.stdout)["data"]
    assert data["verdict"] == "hang_grammar_barrier"
    assert data["health_in_wedge"] == 200
    assert data["before_watchdog_s"] > 0
    assert (Path(data["bundle"]) / "manifest.json").is_file()
    assert data["hasty"]["page_sent"] is True
    assert data["constrained"]["status"] == 400
    assert data["constrained"]["seconds"] < 1
    moments = data["moments_s"]
    assert list(moments) == sorted(moments, key=lambda name: moments[name])
    assert set(moments) == {"wedge", "detected", "captured", "named", "reverted", "fixed", "verified"}
