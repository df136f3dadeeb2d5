"""Takes the nodes down when the replay's own process is gone: a process that waits on a pipe which dies with it.

``python -m opsctl.replay.sweeper PREFIX FOLDER NODE...``: at the end of standard input whatever still lives in the
operator's namespace is killed, and the nodes and their network are taken down. The word ``done`` on standard input means:
not needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from opsctl.staging import nodes
from opsctl.staging.site import python_path_env


@contextlib.contextmanager
def guarded(prefix: str, folder: Path, names: Sequence[str]) -> Iterator[None]:
    """While this is open, the death of this process in any way takes the nodes down; so does an error that cut the orderly
    way short."""
    process = subprocess.Popen([sys.executable, "-m", "opsctl.replay.sweeper", prefix, str(folder), *names], stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               env=python_path_env(os.environ))  # fmt: skip
    assert process.stdin is not None
    try:
        yield
        process.stdin.write(b"done\n")
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(args: Sequence[str]) -> int:
    prefix, folder, *names = args
    if sys.stdin.buffer.read().strip() == b"done":
        return 0
    operator = f"{prefix}-ctl"
    found = subprocess.run(
        ["ip", "netns", "pids", operator], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
    )
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wrong = 0
    for name in names:
        try:
            nodes.SystemdNode(name, 0, Path(folder)).stop()
        except (subprocess.SubprocessError, OSError):
            wrong = 1  # the others are stopped all the same
    nodes.fabric("down", prefix, len(names))
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
