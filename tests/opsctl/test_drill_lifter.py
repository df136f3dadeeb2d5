"""On a staging deployment an injected fault does not outlive the opsctl that injected it, however that one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import Lease, Locked
from opsctl.staging.site import end_all

STEADY = Path(__file__).parent / "steady.py"
HOLDER = """
import os, sys, time
from opsctl.drill.lifter import guarded
with guarded(sys.argv[1], "small", os.environ, int(sys.argv[2])):
    print("open", flush=True)
    sys.stdin.read()
"""


class Admin:
    """The server's admin route. ``busy``: so many requests more are turned away, as by a server that restarts."""

    def __init__(self, busy: int) -> None:
        self.armed, self.busy = ["process.stop:rank=1"], busy
        admin = self

        class Handler(BaseHTTPRequestHandler):
            def do_DELETE(self) -> None:
                admin.busy -= 1
                status = 503 if admin.busy >= 0 else 200
                if status == 200 and self.path == "/admin/faults":
                    admin.armed.clear()
                body = json.dumps({"faults": admin.armed}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@contextmanager
def drill(folder: Path, busy: int = 0) -> Iterator[tuple[Admin, subprocess.Popen[bytes], subprocess.Popen[str]]]:
    """A server with a fault, the drill's monitor, and an opsctl in whose guard the fault was armed."""
    admin = Admin(busy)
    (folder / "fleet.toml").write_text(f'[deployment.small]\nengine = "lastbatch"\nallow_faults = true\n'
                                       f'api = "http://127.0.0.1:{admin.server.server_port}"\n'
                                       '[[deployment.small.node]]\nname = "a"\n')  # fmt: skip
    monitor = subprocess.Popen(["sleep", "300"])
    opsctl = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder / "fleet.toml"), str(monitor.pid)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env=dict(os.environ))  # fmt: skip
    try:
        assert opsctl.stdout is not None and opsctl.stdout.readline() == "open\n"
        yield admin, monitor, opsctl
    finally:
        for process in (opsctl, monitor):
            process.kill()
            process.wait()
        for pipe in (opsctl.stdin, opsctl.stdout):
            assert pipe is not None
            pipe.close()
        admin.close()


def wait_for(condition: Callable[[], Any], deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def lifter_waits(folder: Path) -> bool:
    """Whether the guard's process has read the fleet file and waits."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if "opsctl.drill.lifter" in words and str(folder / "fleet.toml") in words:
                return "pipe" in (path.parent / "wchan").read_text() or (path.parent / "stat").read_text().split()[2] == "S"
    return False


def test_sigkill_of_opsctl_lifts_the_faults_and_ends_the_drills_monitor_also_when_the_server_is_busy(tmp_path: Path) -> None:
    with drill(tmp_path, busy=2) as (admin, monitor, opsctl):
        wait_for(lambda: lifter_waits(tmp_path))
        (tmp_path / "fleet.toml").write_text("no fleet file any more")
        opsctl.kill()
        wait_for(lambda: not admin.armed)
        assert monitor.wait(20) == -15


def test_an_opsctl_that_ends_in_order_lifts_for_itself_and_its_guard_does_nothing(tmp_path: Path) -> None:
    with drill(tmp_path) as (admin, monitor, opsctl):
        assert opsctl.stdin is not None
        opsctl.stdin.close()
        assert opsctl.wait(20) == 0
        assert admin.armed and monitor.poll() is None


def test_a_service_that_a_cut_off_rollout_holds_is_ended_when_its_lease_is_over(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "s.toml").write_text(f"argv = {json.dumps([sys.executable, str(STEADY), 'serve'])}\nstop_s = 1\n")
    service = EmbeddedService(tmp_path, "s", env)
    service.begin_start()
    try:
        service.arm(Lease("t", 0.6))
        with pytest.raises(Locked):
            service.end()
    finally:
        assert end_all([service], 20)
    assert service.ended
