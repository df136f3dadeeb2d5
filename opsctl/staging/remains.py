"""Ends what was started for a site whose own process is gone.

``python -m opsctl.staging.remains FLEET DEPLOYMENT SOCKETS``: an heir (``heir.py``), told ``PID STARTED`` of each process that
looks on. It ends these and the services and takes the folder of sockets away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence

from monitors import fleet
from opsctl.pid import started
from opsctl.rollout import target
from opsctl.staging.heir import inherited
from opsctl.staging.site import end_all


def main(args: Sequence[str]) -> int:
    fleet_path, deployment, sockets = args
    one = fleet.load(fleet_path).one(deployment)  # now: the file may be gone when it is needed
    told = inherited()
    if told is None:
        return 0
    for pid, began in map(str.split, told):
        if started(int(pid)) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)
    ended = end_all(target.of(one, fleet_path, os.environ).managers)
    shutil.rmtree(sockets, ignore_errors=True)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
