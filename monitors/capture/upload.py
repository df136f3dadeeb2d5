"""Hand a finished bundle to the operator's own command, under a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def upload(command: Sequence[str], archive: Path, bundle_id: str, *, deadline_s: float) -> str:
    """Run the command; in its words ``{bundle}`` is the archive's path and ``{id}`` the bundle's name. Returns why it
    failed, or nothing."""
    argv = [word.replace("{bundle}", str(archive)).replace("{id}", bundle_id) for word in command]
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        except OSError as error:
            return f"{argv[0]}: {error.strerror}"
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{argv[0]}: not done after {deadline_s:.0f} s"
        said.seek(0)
        words = said.read().decode(errors="replace").split()
    return "" if code == 0 else f"{argv[0]}: exit status {code}: {' '.join(words)[-300:]}"
