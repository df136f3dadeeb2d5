"""A small deployment of real processes: ranks with black boxes, an HTTP server, a log file, and a receiver of pages."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors import fleet

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def until(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    """The first true value of the condition. Fails with the words of ``what`` when the time is up."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not seen within {deadline_s:.0f} s: {what}")


class Cluster:
    """The ranks of one node (all of the world's by default) in one run directory."""

    def __init__(self, folder: Path, world: int = 3, invocation: str = "ab" * 16, ranks: Sequence[int] | None = None) -> None:
        here = range(world) if ranks is None else ranks
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        self.log.touch()
        env = {**os.environ, "PYTHONPATH": f"{HERE}:{ROOT}", "INVOCATION_ID": invocation, "SPT_NOENV": "1"}
        self.ranks = [
            subprocess.Popen([sys.executable, str(HERE / "smallrank/rank.py"), str(self.run_dir), str(rank), str(world)],
                             stdin=subprocess.PIPE, env=env, cwd=folder)
            for rank in here
        ]  # fmt: skip
        until(lambda: len(list(self.run_dir.glob("rank-*.box"))) == len(here), "every rank has a box")

    def tell(self, mode: str) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(f"{mode}\n".encode())
            process.stdin.flush()

    def boxes(self) -> list[blackbox.Snapshot]:
        return [blackbox.read(path) for path in sorted(self.run_dir.glob("rank-*.box"))]

    def work(self) -> None:
        """Let every rank get through some steps."""
        self.tell("busy")
        until(lambda: all(box.device.ended > 5 for box in self.boxes()), "every rank has done steps")

    def wedge(self, mode: str, *others: Cluster) -> None:
        """Let every rank (those of the other nodes too) stand still in a way, and wait until they all do."""
        nodes = (self, *others)
        for node in nodes:
            node.work()
        at = max(box.host.step for node in nodes for box in node.boxes()) + 60
        for node in nodes:
            node.tell(f"{mode} {at}")
        seen: dict[int, tuple[int, int]] = {}

        def standing() -> bool:
            now = {box.header.rank: (box.host.progress_ns, box.device.begun) for node in nodes for box in node.boxes()}
            still = now == seen
            seen.clear()
            seen.update(now)
            time.sleep(0.4)
            return still

        until(standing, f"all ranks stand still ({mode})")

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.wait(10)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Web:
    """A real HTTP server on loopback: ``pages`` are what GET gives, ``asked`` the paths of each, ``posted`` is what came by POST."""

    def __init__(self, pages: dict[str, tuple[int, str]] | None = None) -> None:
        self.pages = pages or {}
        self.posted: list[Any] = []
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                status, text = outer.pages.get(self.path, (404, ""))
                self._answer(status, text)

            def do_POST(self) -> None:
                outer.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(200, "ok")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def web(pages: dict[str, tuple[int, str]] | None = None) -> Iterator[Web]:
    server = Web(pages)
    try:
        yield server
    finally:
        server.close()


METRICS = "lastbatch:num_running_reqs 2.0\nlastbatch:num_queue_reqs 0.0\nlastbatch:generation_tokens_total 41.0\n"
HEALTHY = {
    "/metrics": (200, METRICS),
    "/health": (200, "ok"),
    "/health_scheduler": (503, "stale"),
    "/server_info": (200, '{"version": "0"}'),
}


def fleet_text(cluster_dirs: list[tuple[str, Path, Path]], api: str, pages: str = "", ranks: int = 3, more: str = "") -> str:
    """A fleet file of one embedded deployment ``small``; each entry is a node's (name, run_dir, log)."""
    text = f'[deployment.small]\nengine = "lastbatch"\napi = "{api}"\nservice = "embedded"\nwatchdog_s = 60\n{more}\n'
    for name, run_dir, log in cluster_dirs:
        text += f'[[deployment.small.node]]\nname = "{name}"\n[[deployment.small.node.service]]\n'
        text += f'unit = "small-{name}"\nrun_dir = "{run_dir}"\nlog = "{log}"\n'
        text += f"ranks = {list(range(ranks))}\n" if len(cluster_dirs) == 1 else ""
    return text + (f'[page]\nurls = ["{pages}"]\n' if pages else "")


def small_fleet(cluster: Cluster, api: str, pages: str = "", more: str = "") -> fleet.Fleet:
    return fleet.parse(fleet_text([("a", cluster.run_dir, cluster.log)], api, pages, more=more), "fleet.toml")
