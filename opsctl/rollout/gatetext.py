"""The gate of a node as a file to put there: ``gate.py`` with its tables filled in for some units."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from monitors import planned, standing
from opsctl.rollout import overlay
from opsctl.service import deadman, gate, listener, nodepage, systemd
from opsctl.service.manager import Lease

_EMPTY = '"""{"units": [], "scripts": [], "files": [], "collectors": [], "pythons": [], "marks": []}"""'


def text(units: Sequence[str], python: str = "python3") -> str:
    """``python``: the node's, as the fleet file names it."""
    monitors = Path(__file__).resolve().parents[2] / "monitors"
    pages = nodepage.files(Lease("", 0), units[0], "", python, "/var/lib/opsctl/owed")
    tables = {
        "units": list(units),
        "scripts": _sums([*deadman.SCRIPTS, *systemd.SCRIPTS, listener.SCRIPT, overlay.SUMS, standing.START, planned.ASK]),
        "marks": _sums([planned.ASK]),
        "files": _sums([deadman.SCRIPT, *(body for name, body in pages if name in ("page.sh", "page.py"))]),
        "pythons": [python],
        "collectors": sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in monitors.rglob("onnode*.py")),
    }
    program = Path(gate.__file__).read_text()
    assert program.count(_EMPTY) == 1
    return "#!/usr/bin/env python3\n" + program.replace(_EMPTY, f'"""{json.dumps(tables)}"""')


def _sums(texts: Sequence[str]) -> list[str]:
    return sorted(hashlib.sha256(one.encode()).hexdigest() for one in texts)
