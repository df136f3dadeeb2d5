"""A capture that is killed at any moment leaves a valid bundle."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from monitors import casefolder
from monitors.capture import bundle
from tests.monitors.cluster import HEALTHY, ROOT, Cluster, fleet_text, small_fleet, until, web

RUNS = int(os.environ.get("KILL_RUNS", "20"))
SEED = int(os.environ.get("KILL_SEED", "7"))


def test_a_capture_killed_at_random_moments_leaves_a_valid_bundle(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    whole = 0
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.wedge("symmetric")
        file = tmp_path / "fleet.toml"
        file.write_text(fleet_text([("a", cluster.run_dir, cluster.log)], server.url))
        for run in range(RUNS):
            root = tmp_path / f"bundles-{run}"
            process = subprocess.Popen([sys.executable, "-m", "tests.monitors.kill_capture", str(file), str(root)], cwd=ROOT)
            try:
                until(lambda root=root: list(root.glob("*/manifest.json")), "the bundle has begun")
                time.sleep(chance.uniform(0, 1.6))
            finally:
                process.kill()
                process.wait()
            (folder,) = root.iterdir()
            checked = bundle.verify(folder)
            assert checked.ok, (run, checked)
            verdict = casefolder.judge(folder) if checked.items else None
            whole += verdict is not None and verdict.verdict == "hang_symmetric_spin"
    assert whole, "no run got as far as the black boxes: the moments are badly chosen and this shows nothing"


def test_a_changed_or_missing_artefact_makes_a_bundle_invalid(tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.work()
        taken = bundle.capture(small_fleet(cluster, server.url).one(), root=tmp_path / "bundles", stacks=False)
    (taken.folder / "ps.txt").write_text("something else\n")
    (taken.folder / "gpu.csv").unlink()
    problems = bundle.verify(taken.folder).problems
    assert any(text.startswith("ps.txt: SHA-256") for text in problems) and any(
        text.startswith("gpu.csv: No such file") for text in problems
    )
