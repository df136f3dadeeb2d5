"""A launcher whose run directory is on a full disk: what it keeps before it kills, and what it says before it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model

SCRIPT = """
import json, sys
from pathlib import Path
from engine.blackbox import BlackBox, Header, read
from engine.launch import evidence

place = Path(sys.argv[1])
box = BlackBox(place / "rank-0.box", Header(pid=1, rank=0, world=1, config_digest=""))
missing = evidence.save(place / "evidence", {}, {0: place / "rank-0.box"}, limit_s=1)
box.close(unlink=True)
print(json.dumps([missing, read(place / "evidence" / "rank-0.box").header.pid]))
"""


def on_a_disk_of(size: str, place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with ``place`` mounted as a small disk of its own. Skips where only root could."""
    mounted = f"mount -t tmpfs -o size={size} tmpfs '{place}' && exec \"$@\""
    ran = subprocess.run(["unshare", "-m", "bash", "-c", mounted, "-", *command], cwd=Path(__file__).parents[2], capture_output=True,
                         text=True, timeout=60)  # fmt: skip
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"a full disk needs root: {ran.stderr.strip()}")
    return ran


def test_a_black_box_is_kept_on_a_disk_that_has_no_room_for_a_copy(tmp_path: Path) -> None:
    ran = on_a_disk_of("300k", tmp_path, sys.executable, "-c", SCRIPT, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [[], 1]


def test_a_server_that_has_no_room_to_start_in_names_the_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    model = tiny_model(tmp_path / "model")
    serve = f"{sys.executable} -m engine.cli serve --model {model} --run-dir {disk}/run --port 0"
    ran = on_a_disk_of("4k", disk, "bash", "-c", f"dd if=/dev/zero of={disk}/x bs=4k count=9; exec {serve}")
    assert ran.returncode == 1
    assert f"lastbatch serve: {disk}/run/lock: No space left on device" in ran.stderr
