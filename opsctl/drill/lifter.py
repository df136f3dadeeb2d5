"""Lifts what a drill armed when its opsctl is gone. A server that was booted for the drill is ended as well, by its site's own heir.

``python -m opsctl.drill.lifter FLEET DEPLOYMENT PID STARTED``: an heir (``opsctl/staging/heir.py``), which lifts all faults and
ends the drill's monitor, process PID.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping

from monitors import fleet
from opsctl.pid import started
from opsctl.playbooks.actions import Place
from opsctl.playbooks.server import Deployed
from opsctl.staging.heir import heir, inherited

_TRY_S = 60.0


@contextlib.contextmanager
def guarded(fleet_path: str, deployment: str, env: Mapping[str, str], monitor: int) -> Iterator[None]:
    """While this is open, the death of this process in any way lifts the faults, and so does an interrupt that leaves it.
    ``monitor``: the pid of the drill's hang monitor."""
    with heir("opsctl.drill.lifter", fleet_path, deployment, str(monitor), started(monitor), env=env, deadline_s=10) as waits:
        try:
            yield
        except KeyboardInterrupt:
            raise  # perhaps in the midst of the lifting: the heir sees to it
        except BaseException:
            waits.dismiss()
            raise
        else:
            waits.dismiss()


def lift(fleet_path: str, deployment: str, env: Mapping[str, str], deadline_s: float, whole: fleet.Fleet | None = None) -> str:
    """Lift all faults, trying until the deadline: a server that restarts takes no request. Empty, or why not. ``whole``: the
    fleet file as it was."""
    whole = whole or fleet.load(fleet_path)
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
    fleet_path, deployment, monitor, began = args
    whole = fleet.load(fleet_path)  # now: the file may be gone, or another, when it is needed
    if inherited() is None:
        return 0
    if started(int(monitor)) == began:
        os.kill(int(monitor), signal.SIGTERM)
    return 1 if lift(fleet_path, deployment, os.environ, _TRY_S, whole) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
