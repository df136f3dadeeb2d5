"""What follows a capture, beside the watch and never in its way: report, archive, upload, room for the next one; and what
follows the page for a wedge, the fleet file's ``on_wedge``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monitors import fleet, report
from monitors.capture import archive, retention
from monitors.capture.upload import upload

Emit = Callable[..., None]


def follow(whole: fleet.Fleet, folder: Path, emit: Emit) -> None:
    """Never raises: each step's failure is an event, and the next step goes on."""
    keep = whole.capture
    _step("report", folder, emit, report.write)
    packed = _step("archive", folder, emit, archive.pack) if keep.archive or keep.upload else None
    if keep.upload and packed is not None:
        why = upload(keep.upload, packed, folder.name, deadline_s=keep.upload_deadline_s)
        emit("uploaded", ok=not why, reason=why)
    with contextlib.suppress(OSError):
        gone = retention.prune(folder.parent, most=keep.keep, most_bytes=keep.keep_bytes)
        if gone:
            emit("pruned", bundles=gone)


def _step(name: str, folder: Path, emit: Emit, make: Callable[[Path], Path]) -> Path | None:
    try:
        made = make(folder)
    except Exception as error:  # the evidence is safe: what is made of it must not end the watch
        emit("error", text=f"{name} of {folder.name}: {type(error).__name__}: {error}")
        return None
    emit(name, path=str(made))
    return made


def command(whole: fleet.Fleet, deployment: fleet.Deployment) -> list[str]:
    """The ``opsctl`` command of ``on_wedge``."""
    chosen = ["--fleet", whole.path, "--deployment", deployment.name, "--json"]
    opsctl = Path(sys.executable).with_name("opsctl")
    head = [str(opsctl)] if opsctl.exists() else ["opsctl"]
    if deployment.on_wedge.action == "restart":
        return [*head, "service", "restart-group", *chosen]
    return [*head, "playbook", "run", deployment.on_wedge.playbook, "--yes", "--incident", *chosen]


def act(whole: fleet.Fleet, deployment: fleet.Deployment, emit: Emit) -> None:
    """Run it under its deadline: what it started is ended with it."""
    argv = command(whole, deployment)
    limit = deployment.on_wedge.deadline_s
    emit("acting", action=deployment.on_wedge.action, command=argv)
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        except OSError as error:
            emit("acted", ok=False, reason=f"{argv[0]}: {error.strerror}")
            return
        why: dict[str, Any] = {}
        try:
            code = process.wait(limit)
            why = {"ok": code == 0, "exit_code": code}
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # opsctl reverts on SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            why = {"ok": False, "reason": f"not done after {limit:.0f} s"}
        said.seek(0)
        emit("acted", **why, said=said.read().decode(errors="replace")[-1000:])
