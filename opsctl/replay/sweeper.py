"""Takes the nodes down when the replay's own process is gone.

``python -m opsctl.replay.sweeper PREFIX FOLDER NODE...``: an heir (``opsctl/staging/heir.py``). Whatever still lives in the
operator's namespace is killed, and the nodes and their network are taken down.
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
from opsctl.staging.heir import heir, inherited
from opsctl.staging.site import python_path_env


@contextlib.contextmanager
def guarded(prefix: str, folder: Path, names: Sequence[str]) -> Iterator[None]:
    """While this is open, the death of this process in any way takes the nodes down; so does an error that cut the orderly
    way short."""
    with heir("opsctl.replay.sweeper", prefix, str(folder), *names, env=python_path_env(os.environ)) as waits:
        yield
        waits.dismiss()


def main(args: Sequence[str]) -> int:
    prefix, folder, *names = args
    if inherited() is None:
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
    nodes.clear(Path(folder))
    for key in ("id", "id.pub"):  # of nodes that are gone
        (Path(folder).parent / key).unlink(missing_ok=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
