"""The contract server as a process by itself, without a service manager."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from opsctl.rollout.probe import Api
from tests.opsctl.site import SERVER, wait_until
from tests.ports import free_port


@contextlib.contextmanager
def contract(folder: Path, *args: str) -> Iterator[Api]:
    """The contract server by itself, its API ready."""
    port = free_port()
    argv = [sys.executable, str(SERVER), "serve", "--port", str(port), "--run-dir", str(folder), *args]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    api = Api(f"http://127.0.0.1:{port}")
    try:
        wait_until(api.healthy, what="the server to be ready")
        yield api
    finally:
        process.kill()
        process.wait()
        api.close()
