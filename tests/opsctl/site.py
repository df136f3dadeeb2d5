"""A deployment of the contract server on this machine, under the embedded supervisor, with a pager that listens."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx

from opsctl import cli
from opsctl.service.embedded import EmbeddedService
from tests.patience import CROWDED
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).parent / "contract_server.py"


def wait_until(done: Callable[[], Any], deadline_s: float = 10.0, what: str = "the condition") -> None:
    until = time.monotonic() + CROWDED * deadline_s
    while not done():
        assert time.monotonic() < until, f"{what}: not within {CROWDED * deadline_s:g} s"
        time.sleep(0.01)


class Pages:
    """A real HTTP receiver for apprise's json:// URLs."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass
class Ran:
    """One opsctl command that ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)["data"]

    @property
    def errors(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self.out)["errors"]
        return found


class Site:
    """``nodes`` services form one tensor-parallel group of as many ranks; ``fleet`` is more of the fleet file."""

    def __init__(
        self, folder: Path, *, nodes: int = 1, args: Sequence[str] = (), definition: str = "", fleet: str = "", engine: str = "lastbatch"
    ) -> None:
        self.folder, self.nodes, self.fleet, self.engine = folder, nodes, fleet, engine
        self.port = free_port()
        self.pages = Pages()
        self.names = [f"node{rank}" for rank in range(nodes)]
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
        }
        (folder / "services").mkdir(parents=True)
        group = ["--tp", str(nodes), "--nnodes", str(nodes), "--dist-init-addr", "127.0.0.1:1"] if nodes > 1 else []
        for rank, name in enumerate(self.names):
            own = [*group, "--node-rank", str(rank)] if nodes > 1 else []
            argv = [sys.executable, str(SERVER), "serve", "--port", str(self.port), *own, *args]
            where = f"run_dir = '../boxes/{name}'\nlog = '../log/{name}.log'\n"
            text = f"argv = {json.dumps(argv)}\nrestart_s = 0.3\nstop_s = 3\n{where}{definition}"
            (folder / "services" / f"{name}.toml").write_text(text)
        self.write_fleet()

    def write_fleet(self, page_url: str = "") -> None:
        services = ""
        for rank, name in enumerate(self.names):
            services += f"[[deployment.d.node.service]]\nunit = '{name}'\nranks = [{rank}]\nlog = 'log/{name}.log'\n"
        (self.folder / "fleet.toml").write_text(
            f"[deployment.d]\nengine = '{self.engine}'\napi = 'http://127.0.0.1:{self.port}'\nservice = 'embedded'\nstable_s = 0.3\n"
            f"[[deployment.d.node]]\nname = 'a'\n{services}{self.fleet}\n[page]\nurls = ['{page_url or self.pages.url}']\n"
        )

    @property
    def services(self) -> list[EmbeddedService]:
        return [EmbeddedService(self.folder / "services", name, self.env) for name in self.names]

    def start(self) -> None:
        for service in self.services:
            service.begin_start()
        wait_until(self.answers, what="the deployment to answer")

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, **more: Any) -> httpx.Response:
        body = {"model": "contract", "messages": [{"role": "user", "content": "hello"}], **more}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, timeout=5)

    def argv(self, *words: str) -> list[str]:
        where = ["--fleet", str(self.folder / "fleet.toml"), "--deployment", "d"]
        return ["rollout", *words, *where, *([] if "--json" in words else ["--json"])]

    def rollout(self, *words: str) -> Ran:
        """Run ``opsctl rollout`` in this process."""
        out, err = io.StringIO(), io.StringIO()
        code = cli.main(self.argv(*words), self.env, stdin=io.StringIO(), stdout=out, stderr=err)
        return Ran(int(code), out.getvalue(), err.getvalue())

    def apply(self, *words: str) -> Ran:
        return self.rollout("apply", "--yes", "--boot-deadline-s", "8", *words)

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        """The same as a process of its own, to be killed."""
        return subprocess.Popen(
            [sys.executable, "-m", "opsctl.cli", *self.argv(*words)], cwd=ROOT, env=self.env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @property
    def journals(self) -> Path:
        return self.folder / "state" / "lastbatch" / "rollouts" / "d"

    @property
    def running(self) -> list[list[str]]:
        """The arguments after ``serve`` of every main process."""
        found = [list(service.argv()) for service in self.services]
        return [argv[argv.index("serve") + 1 :] if "serve" in argv else [] for argv in found]

    def close(self) -> None:
        for service in self.services:
            token = service.lease_token()
            if token:
                service.disarm(token)
            service.end()
        wait_until(lambda: all(service.ended for service in self.services), what="every supervisor to end")
        self.pages.close()
