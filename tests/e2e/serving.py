"""A real server for tests: ``lastbatch serve`` with all its processes, on a small random model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine import blackbox
from tests.patience import CROWDED

BOOT_S = 90.0


def wait_for(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """The first true value of ``condition``; AssertionError, naming ``what``, when none comes in time. ``deadline_s``: of a
    machine that is not crowded."""
    until = time.monotonic() + CROWDED * deadline_s
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not happen in {CROWDED * deadline_s:g} s"
        time.sleep(0.02)
    return found


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    run_dir: Path
    log: Path
    url: str = ""

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)

    @property
    def described(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "launcher.json").read_text())  # type: ignore[no-any-return]

    def rank_pid(self, rank: int) -> int:
        return next(int(one["pid"]) for one in self.described["ranks"] if one["rank"] == rank)

    def box(self, rank: int) -> blackbox.Snapshot:
        return blackbox.read(self.run_dir / f"rank-{rank}.box")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def complete(self, prompt: str = "The quick brown fox", **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        with self.client as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def arm(self, spec: str) -> None:
        with self.client as client:
            answer = client.post("/admin/faults", json={"fault": spec})
        assert answer.status_code == 200, answer.text

    def stop(self, number: int = signal.SIGTERM, deadline_s: float = 40.0) -> int:
        """Signal the launcher and wait; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(deadline_s)

    def wait_ready(self, deadline_s: float = BOOT_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.text()[-3000:]}"
            return "Ready: configuration" in self.text()

        wait_for(ready, deadline_s, f"readiness of the server (log: {self.text()[-2000:]})")
        if self.described.get("api_pid"):
            self.url = f"http://127.0.0.1:{self.described['port']}"


def start(model: Path, folder: Path, args: Sequence[str] = (), env: dict[str, str] | None = None, name: str = "server") -> Served:
    """Start a server and return at once. Port 0: the kernel picks one."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    run_dir = folder / f"run-{name}"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.cli", "serve", "--model", str(model), "--run-dir", str(run_dir), "--port", "0", *args],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            env={**os.environ, "INVOCATION_ID": os.urandom(16).hex(), **(env or {})},
        )  # fmt: skip
    return Served(process, run_dir, log)


@contextlib.contextmanager
def serving(model: Path, folder: Path, *args: str, env: dict[str, str] | None = None, name: str = "server") -> Iterator[Served]:
    """A ready server; whatever the test did to it, nothing of it is left afterwards."""
    served = start(model, folder, args, env, name)
    family: list[psutil.Process] = []
    try:
        served.wait_ready()
        family = served.descendants()
        yield served
    finally:
        family += served.descendants()
        if served.process.poll() is None:
            served.process.kill()
        served.process.wait(20)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=10)
