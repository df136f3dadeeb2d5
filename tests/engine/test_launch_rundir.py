"""The run directory: one holder, and what a killed server left is swept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.launch.rundir import RunDirectory


def test_it_is_held_by_one_and_given_back_empty(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match="is in use by a server"):
        RunDirectory(tmp_path / "run")
    held.close()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_servers_are_swept_and_the_last_evidence_is_kept(tmp_path: Path) -> None:
    names = [f"evidence-20260101T0000{number:02d}Z" for number in range(12)]
    for name in (*names, "lastbatch-old", "previous"):
        (tmp_path / name).mkdir()
    for name in ("rank-0.box", "remote-rank-2.box"):
        (tmp_path / name).write_bytes(b"box")
    held = RunDirectory(tmp_path)
    assert sorted(path.name for path in (tmp_path / "previous").iterdir()) == ["rank-0.box", "remote-rank-2.box"]
    assert sorted(path.name for path in tmp_path.glob("evidence-*")) == names[-8:]
    assert not (tmp_path / "lastbatch-old").exists() and held.sockets.is_dir()
    assert not list(tmp_path.glob("*.box"))
    held.close()


def test_sockets_that_a_killed_start_left_elsewhere_are_swept_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / ("run" * 20)  # too long to hold a socket
    killed = RunDirectory(path)
    assert killed.sockets.parent == Path(tempfile.gettempdir()) and killed.sockets.is_dir()
    os.close(killed._lock)  # as its death would
    held = RunDirectory(path)
    assert not killed.sockets.exists() and held.sockets.is_dir()
    held.close()
    assert not held.sockets.exists() and not path.exists()
