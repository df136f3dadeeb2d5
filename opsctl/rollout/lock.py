"""One operator at a time for each deployment, on this machine; leases on the services see to other machines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from opsctl.service.manager import Locked


@contextlib.contextmanager
def held(
    folder: Path, who: str, wait_s: float = 0.0, *, what: str = "rollout", see: str = "; see `opsctl rollout status`"
) -> Iterator[None]:
    """Hold the lock of a deployment's state folder. A dead owner holds nothing. ``what`` and ``see`` are words for who finds it
    held. Raises Locked."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    owner = os.read(descriptor, 200).decode(errors="replace").strip()
                    raise Locked(f"{folder.name}: another {what} is under way ({owner or 'unknown owner'}){see}") from None
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{who}, pid {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
