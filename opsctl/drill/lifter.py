"""Lifts what a drill armed when its opsctl is gone: a process of its own, which waits on a pipe that dies with opsctl.

``python -m opsctl.drill.lifter FLEET DEPLOYMENT lift|end PID STARTED``: at the end of standard input all faults are lifted
and the drill's monitor, process PID, is ended; ``end`` also ends the services, which were started for the drill alone. The
word ``done`` on standard input means: not needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from monitors import fleet
from opsctl.pid import started
from opsctl.playbooks.actions import Place
from opsctl.playbooks.server import Deployed
from opsctl.rollout import target
from opsctl.staging.site import end_all

_TRY_S = 60.0


@contextlib.contextmanager
def guarded(fleet_path: str, deployment: str, what: str, env: Mapping[str, str], monitor: int) -> Iterator[None]:
    """While this is open, the death of this process in any way lifts the faults (and, with ``end``, ends the services).
    ``monitor``: the pid of the drill's hang monitor."""
    words = [fleet_path, deployment, what, str(monitor), started(monitor)]
    process = subprocess.Popen([sys.executable, "-m", "opsctl.drill.lifter", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, env=dict(env), start_new_session=True)  # fmt: skip
    assert process.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.write(b"done\n")
            process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lift(fleet_path: str, deployment: str, env: Mapping[str, str], deadline_s: float) -> str:
    """Lift all faults, trying until the deadline: a server that restarts takes no request. Empty, or why not."""
    whole = fleet.load(fleet_path)
    chosen = whole.one(deployment)
    server = Deployed(whole, chosen, Place(fleet_path, deployment, chosen.api, chosen.api_key_file, dict(env)))
    until = time.monotonic() + deadline_s
    try:
        while why := server.lift():
            if time.monotonic() > until:
                return why
            time.sleep(0.5)
        return ""
    finally:
        server.close()


def main(args: list[str]) -> int:
    fleet_path, deployment, what, monitor, began = args
    if sys.stdin.buffer.read().strip() == b"done":
        return 0
    if started(int(monitor)) == began:
        os.kill(int(monitor), signal.SIGTERM)
    why = lift(fleet_path, deployment, os.environ, 5.0 if what == "end" else _TRY_S)
    if what == "end":
        return 0 if end_all(target.of(fleet.load(fleet_path).one(deployment), fleet_path, os.environ).managers) else 1
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
