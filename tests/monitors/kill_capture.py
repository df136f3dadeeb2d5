"""Take one bundle: ``python kill_capture.py FLEET ROOT``. A test kills this in mid-capture."""

import sys
from pathlib import Path

from monitors import fleet
from monitors.capture import bundle

if __name__ == "__main__":
    bundle.capture(fleet.load(sys.argv[1]).one(), root=Path(sys.argv[2]), progress={"stalled_s": 1.0})
