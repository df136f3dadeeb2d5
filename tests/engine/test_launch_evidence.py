"""What the launcher keeps before it kills, where there is no room for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_black_box_is_kept_on_a_disk_that_has_no_room_for_a_copy(tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o size=300k tmpfs '{tmp_path}' && exec '{sys.executable}' -c \"$0\" '{tmp_path}'"
    ran = subprocess.run(["unshare", "-m", "bash", "-c", mounted, SCRIPT], cwd=Path(__file__).parents[2], capture_output=True, text=True,
                         timeout=60)  # fmt: skip
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"a full disk needs root: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [[], 1]
