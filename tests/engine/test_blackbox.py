"""The black box's own promises: what was written is read, by path or from a copy, and a box that has no room says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import blackbox
from engine.blackbox import BatchKind, BlackBox, BoxError, CollectiveKind, EventKind, Header, Phase


def test_what_was_written_is_read_by_path_and_from_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.box"
    box = BlackBox(path, Header(pid=7, rank=3, world=4, config_digest="d" * 32, invocation_id="a" * 32, tp=3, name="flash"), '{"a":1}')
    box.enter(Phase.launch)
    box.beat(step=9, running=2, held=5, progress=True)
    box.event(EventKind.batch_begin, BatchKind.verify, 1, 9, 4)
    box.event(EventKind.batch_request, 0, 1, blackbox.request_hash("r"), 30, 4, 3)
    box.collective_enqueued(CollectiveKind.all_reduce, 12, 2304)
    for read in (blackbox.read(path), blackbox.decode(path.read_bytes())):
        assert (read.header.rank, read.header.name, read.header.invocation_id, read.settings_json) == (3, "flash", "a" * 32, '{"a":1}')
        assert (read.host.step, read.host.phase, read.host.held, read.device.enqueued) == (9, Phase.launch, 5, 12)
        begun, requests = read.last_batch() or pytest.fail("no batch")
        assert (begun.sub, [event.b for event in requests]) == (BatchKind.verify, [30])
        opened = read.open_collective()
        assert opened is not None and opened.a == 12
    box.close(unlink=True)
    assert not path.exists()


def test_a_box_without_room_says_which_and_how_much_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, pathlib; from engine.blackbox import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        f"BlackBox(pathlib.Path('{tmp_path}/rank-0.box'), Header(pid=1, rank=0, world=1, config_digest=''))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=30)
    assert f"BoxError: {tmp_path}/rank-0.box: File too large; a black box takes {blackbox.BOX_BYTES} bytes" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"x", "1 bytes, a black box has"), (b"\0" * blackbox.BOX_BYTES, "does not begin with LBBX")],
)
def test_what_is_no_box_is_named(data: bytes, says: str) -> None:
    with pytest.raises(BoxError, match=says):
        blackbox.decode(data, "some file")
