"""The demo's deployment: one tensor-parallel group of three ranks on two "nodes" of this machine, and its monitor."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

DEPLOYMENT = "flash"
WATCHDOG_S = 60
STALL_S = 5.0
_ENGINE = (sys.executable, "-m", "engine.cli", "serve")
_GROUP = ("--tp", "3", "--nnodes", "2", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4",
          "--enable-overlap-schedule", "--context-length", "4096", "--max-total-tokens", "16384",
          "--watchdog-timeout", str(WATCHDOG_S), "--drain-timeout", "3",
          "--enable-faults", "--fault", "grammar.verify_desync", "--fault", "decode.crash:when=sequential")  # fmt: skip
_FLEET = """# Written by `opsctl demo`: one deployment, two "nodes" on this machine.
[deployment.{name}]
engine = "lastbatch"
api = "http://127.0.0.1:{port}"
watchdog_s = {watchdog}
service = "embedded"
allow_faults = true
boot_deadline_s = 150
stable_s = 5
bundle_dir = "{folder}/bundles"
{nodes}
[[deployment.{name}.caller]]
name = "scan"
request = {{ messages = [{{ role = "user", content = "one item as JSON" }}], response_format = {{ type = "json_object" }} }}
expect = "json"
probe = "never-live"
[page]
urls = ["json://127.0.0.1:{pager}/"]
"""
_NODE = """[[deployment.{name}.node]]
name = "{node}"
[[deployment.{name}.node.service]]
unit = "{unit}"
ranks = {ranks}
run_dir = "{folder}/run/{unit}"
log = "{folder}/log/{unit}.log"
command = {command}
args = {args}
"""


class DemoError(RuntimeError):
    """The demo could not go on; the text says at which step and why."""


def wait_for(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """The first true value of ``condition``. Raises DemoError when none comes in time."""
    until = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise DemoError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.05)
    return found


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free now, below those that the kernel itself gives away."""
    for _ in range(50):
        first = random.randint(15_000, 32_000)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise DemoError(f"no {count} free ports in a row on 127.0.0.1")


class Pager:
    """Whoever is on call: receives what apprise posts."""

    def __init__(self, on_page: Callable[[str], None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                page = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                on_page(str(page.get("title", "")))

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Watcher:
    """``hang-monitor run --json`` and its events, in the order in which they came."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    _lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait(self, name: str, deadline_s: float) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.events.append(json.loads(self._lines.get_nowait()))
            if self.process.poll() is not None:
                raise DemoError(f"hang-monitor ended with {self.process.returncode}")
            return next((event for event in self.events if event["event"] == name), None)

        event: dict[str, Any] = wait_for(found, deadline_s, f"the monitor's event {name!r}")
        return event

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Site:
    """Everything the demo starts. ``folder`` keeps logs, bundles and journals; sockets lie in a short-lived one."""

    def __init__(self, folder: Path, env: Mapping[str, str], pager: Pager, model: str = "") -> None:
        self.folder = folder
        self.port = _free_ports(1)
        self._sockets = Path(tempfile.mkdtemp(prefix="lastbatch-demo-"))
        self.env = {**env, "XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(self._sockets), "PYTHONUNBUFFERED": "1"}
        self.fleet = folder / "fleet.toml"
        self.units = ("flash-a", "flash-b")
        rendezvous = f"127.0.0.1:{_free_ports(4)}"
        chosen = ("--model", model) if model else ()
        nodes = ""
        for rank, (unit, ranks) in enumerate(zip(self.units, ([0, 1], [2]), strict=True)):
            own = ("--node-rank", str(rank), "--dist-init-addr", rendezvous, "--port", str(self.port),
                   "--run-dir", f"{folder}/run/{unit}", "--name", unit)  # fmt: skip
            args = json.dumps([*_GROUP, *chosen, *own])
            nodes += _NODE.format(name=DEPLOYMENT, node="ab"[rank], unit=unit, ranks=ranks, folder=folder, args=args,
                                  command=json.dumps(list(_ENGINE)))  # fmt: skip
        (folder / "log").mkdir(parents=True, exist_ok=True)
        self.fleet.write_text(
            _FLEET.format(name=DEPLOYMENT, port=self.port, watchdog=WATCHDOG_S, folder=folder, nodes=nodes, pager=pager.port)
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def opsctl(self, *words: str, deadline_s: float) -> dict[str, Any]:
        """Run an opsctl command as an operator would, and return its JSON envelope."""
        command = [sys.executable, "-m", "opsctl.cli", *words, "--fleet", str(self.fleet), "--deployment", DEPLOYMENT, "--json"]
        with (self.folder / "log" / "opsctl.log").open("a") as log:
            log.write(f"$ opsctl {' '.join(words)}\n")
            log.flush()
            try:
                done = subprocess.run(
                    command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    timeout=deadline_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise DemoError(f"opsctl {' '.join(words[:2])}: no end in {deadline_s:g} s; see {log.name}") from error
        try:
            envelope: dict[str, Any] = json.loads(done.stdout)
        except ValueError as error:
            raise DemoError(
                f"opsctl {' '.join(words[:2])}: exit code {done.returncode} and no JSON; see {self.folder}/log/opsctl.log"
            ) from error
        return envelope

    def monitor(self) -> Watcher:
        command = [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(self.fleet), "--stall-s", str(STALL_S), "--json",
                   "--state-dir", str(self.folder / "state" / "monitor")]  # fmt: skip
        with (self.folder / "log" / "hang-monitor.log").open("w") as log:
            return Watcher(subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True))

    def box(self, rank: int) -> Path:
        return self.folder / "run" / self.units[0 if rank < 2 else 1] / f"rank-{rank}.box"

    def wait_ready(self, deadline_s: float) -> None:
        def ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health_scheduler", timeout=5).status_code == 200
            return False

        wait_for(ready, deadline_s, f"the server to be ready (logs: {self.folder}/log)")

    def close(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)


@contextlib.contextmanager
def demo_site(env: Mapping[str, str], on_page: Callable[[str], None], model: str = "") -> Iterator[Site]:
    """A site in the user's state folder; all that it started is ended when the block is left, whatever happened."""
    base = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "lastbatch"
    folder = base / time.strftime("demo-%Y%m%dT%H%M%SZ", time.gmtime())
    folder.mkdir(parents=True)
    pager = Pager(on_page)
    site = Site(folder, env, pager, model)
    try:
        yield site
    finally:
        from monitors import fleet
        from opsctl.rollout import target

        members = target.of(fleet.load(site.fleet).one(DEPLOYMENT), str(site.fleet), site.env).managers
        for manager in members:
            with contextlib.suppress(Exception):
                manager.end()  # type: ignore[attr-defined]
        until = time.monotonic() + 60
        while not all(manager.ended for manager in members) and time.monotonic() < until:  # type: ignore[attr-defined]
            time.sleep(0.1)
        site.close()
        pager.close()


def python_path_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for child processes that import from this tree when it is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))}
