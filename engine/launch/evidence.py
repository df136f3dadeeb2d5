"""What the watchdog saves before it kills: every rank's black box and stacks, with a time limit on each."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_TRIES = 3  # of py-spy, for each rank


def save(folder: Path, pids: Mapping[int, int], boxes: Mapping[int, Path], *, limit_s: float) -> list[str]:
    """Write ``rank-<n>.box`` and ``stacks-<n>.txt`` for every rank into ``folder``.

    ``pids``: of the ranks on this node. All stacks are taken at once, each within ``limit_s``. Returns what could
    not be had, in words. Never raises: a kill that waits for its evidence is worse than missing evidence.
    """
    missing: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [f"{folder}: {error.strerror}"]
    for rank, path in boxes.items():
        try:
            _keep(path, folder / f"rank-{rank}.box")
        except OSError as error:
            missing.append(f"black box of rank {rank}: {error.strerror}")
    missing += _stacks(folder, pids, limit_s)
    return missing


def _keep(path: Path, target: Path) -> None:
    """A copy as it is now; on a full disk the file itself under a second name, which takes no room and ends as it will."""
    try:
        shutil.copyfile(path, target)
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        target.hardlink_to(path)


def _stacks(folder: Path, pids: Mapping[int, int], limit_s: float) -> list[str]:
    """A process that runs on while it is read may have moved what py-spy was about to read: then it is asked again."""
    until = time.monotonic() + limit_s
    missing: dict[int, str] = {}
    left = dict(pids)
    for _ in range(_TRIES):
        missing = _dump(folder, left, until, limit_s)
        left = {rank: pid for rank, pid in left.items() if rank in missing}
        if not left or time.monotonic() >= until:
            break
    return list(missing.values())


def _dump(folder: Path, pids: Mapping[int, int], until: float, limit_s: float) -> dict[int, str]:
    """One try for each rank, all at once. Returns why it failed, by rank."""
    spy = Path(sys.executable).parent / "py-spy"
    missing: dict[int, str] = {}
    running: dict[int, subprocess.Popen[bytes]] = {}
    for rank, pid in pids.items():
        try:
            with (folder / f"stacks-{rank}.txt").open("wb") as target:
                running[rank] = subprocess.Popen([str(spy), "dump", "--nonblocking", "--pid", str(pid)], stdin=subprocess.DEVNULL,
                                                 stdout=target, stderr=subprocess.STDOUT)  # fmt: skip
        except OSError as error:
            missing[rank] = f"stacks of rank {rank}: {error.strerror}"
    for rank, process in running.items():
        try:
            if process.wait(max(0.0, until - time.monotonic())) != 0:
                missing[rank] = f"stacks of rank {rank}: py-spy exited with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            missing[rank] = f"stacks of rank {rank}: py-spy took more than {limit_s:g} s"
    return missing
