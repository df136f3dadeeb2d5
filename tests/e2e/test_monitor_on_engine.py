"""The hang monitor beside the real engine: every wedge is declared, captured and named; nothing else raises anything."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Served, serving, wait_for
from tests.tiny_models import tiny_model

ENGINE = ("--tp", "2", "--enable-faults", "--watchdog-timeout", "90", "--speculative-algorithm", "NGRAM", "--context-length", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@dataclass
class Monitor:
    """``hang-monitor run --json``, its events as they come."""

    process: subprocess.Popen[str]
    bundles: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    _inbox: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._inbox.put(line)

    def wait(self, name: str, deadline_s: float) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.events.append(json.loads(self._inbox.get_nowait()))
            return next((event for event in self.events if event["event"] == name), None)

        return wait_for(found, deadline_s, f"event {name!r} (so far: {[event['event'] for event in self.events]})")  # type: ignore[no-any-return]


@contextlib.contextmanager
def watching(served: Served, folder: Path, more: str = "") -> Iterator[Monitor]:
    """A monitor with the settings that it comes with."""
    fleet = folder / "fleet.toml"
    fleet.write_text(f"""
[deployment.tiny]
engine = "lastbatch"
api = "{served.url}"
watchdog_s = 90
service = "embedded"
allow_faults = true
[[deployment.tiny.node]]
name = "a"
[[deployment.tiny.node.service]]
unit = "tiny.service"
ranks = [0, 1]
log = "{served.log}"
run_dir = "{served.run_dir}"
{more}
""")
    bundles = folder / "bundles"
    with (folder / "monitor.log").open("w") as log:
        process = subprocess.Popen(
        [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(fleet), "--json",
         "--state-dir", str(folder / "state"), "--bundle-dir", str(bundles)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    monitor = Monitor(process, bundles)
    try:
        yield monitor
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        monitor.reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


def ask_in_background(served: Served, **body: Any) -> None:
    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=served.url, timeout=httpx.Timeout(60, connect=5)) as client:
            client.post("/v1/completions", json={"prompt": "one two one two", "temperature": 0, "ignore_eos": True, **body})

    threading.Thread(target=ask, daemon=True).start()


def trigger(served: Served, fault: str) -> None:
    grammar = {"max_tokens": 200, "ignore_eos": False, "regex": "(ab){20,90}"}
    if fault.startswith("grammar"):
        served.complete(**grammar)  # alone, and compiled once: it must join the other request while that one runs
    served.arm(fault)
    ask_in_background(served, max_tokens=400)
    if fault.startswith("grammar"):
        wait_for(lambda: served.box(0).host.running > 0, 10, "the first request to run")
        ask_in_background(served, **grammar)


# `make prove-monitor` plays every fault over two nodes, small ranks show every class, and tests/e2e/test_drills.py plays three
# on the real engine: one does here.
@pytest.mark.parametrize(
    ("fault", "classes"),
    [
        ("grammar.verify_desync", {"hang_grammar_barrier"}),
        pytest.param("collective.mismatch:rank=1,after_steps=5", {"hang_symmetric_spin"}, marks=pytest.mark.slow),
        pytest.param("collective.skip:rank=1,after_steps=5", {"hang_tp_desync"}, marks=pytest.mark.slow),
        pytest.param("callback.stall:rank=1", {"hang_host_callback", "hang_asymmetric"}, marks=pytest.mark.slow),
        pytest.param("callback.stall:rank=1,hold_gil=true", {"hang_host_callback", "hang_asymmetric"}, marks=pytest.mark.slow),
        pytest.param("progress.none:after_steps=5", {"hang_control_plane"}, marks=pytest.mark.slow),
        pytest.param("cpu.spin:rank=0", {"hang_cpu_bound"}, marks=pytest.mark.slow),
        pytest.param("process.stop:rank=1", {"hang_stopped"}, marks=pytest.mark.slow),
    ],
)
def test_a_wedge_is_declared_captured_and_named(model: Path, tmp_path: Path, fault: str, classes: set[str]) -> None:
    with serving(model, tmp_path, *ENGINE) as served, watching(served, tmp_path) as monitor:
        served.complete()
        trigger(served, fault)
        declared = monitor.wait("stall_declared", 40)
        assert declared["stall_s"] <= 5, "seconds after the last progress, on a machine that is not crowded"
        assert declared["quiet_s"] < 15
        verdict = monitor.wait("verdict", 40)
        assert verdict["verdict"] in classes, verdict
        assert verdict["runbook"] == f"runbooks/{verdict['verdict']}.md"
        captured = monitor.wait("captured", 60)
        bundle = Path(captured["bundle"])
        manifest = json.loads((bundle / "manifest.json").read_text())
        kept = {item["path"] for item in manifest["items"] if item["outcome"] == "taken"}
        assert {"rank-0.box", "rank-1.box", "server.log", "metrics.txt"} <= kept, kept
        assert {"pyspy-0.json", "pyspy-1.json"} <= kept or "hold_gil" in fault, kept
        text = json.dumps(verdict) + (bundle / "server.log").read_text()
        assert fault.split(":")[0] not in text, "the fault is named: the verdict proves nothing"
        replayed = subprocess.run([sys.executable, "-m", "monitors.cli", "replay", str(bundle), "--json"], capture_output=True, text=True,
                                  timeout=60, check=True)  # fmt: skip
        assert json.loads(replayed.stdout)["verdict"] in classes, replayed.stdout
        assert served.process.poll() is None, "the server was killed before it was captured"


def test_a_rank_out_of_memory_is_named_so(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *ENGINE) as served, watching(served, tmp_path) as monitor:
        served.complete()
        monitor.wait("state", 20)
        served.arm("memory.exhaust")
        ask_in_background(served, max_tokens=20)
        assert monitor.wait("verdict", 60)["verdict"] == "oom", monitor.events


def test_wrong_answers_under_load_are_found_by_the_seeded_canary_and_right_ones_are_not(model: Path, tmp_path: Path) -> None:
    canary = "[deployment.tiny.canary]\nload_every_s = 0.5"
    with serving(model, tmp_path, *ENGINE) as served, watching(served, tmp_path, canary) as monitor:

        def answers(**wanted: object) -> list[dict[str, Any]]:
            with contextlib.suppress(AssertionError):
                monitor.wait("never", 0.05)
            return [e for e in monitor.events if e["event"] == "canary" and all(e[key] == value for key, value in wanted.items())]

        wait_for(lambda: len(answers(answer="learning")) >= 2, 30, "the canary's answer to be recorded at rest")
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    served.complete(max_tokens=200)

        busy = [threading.Thread(target=load) for _ in range(2)]
        for one in busy:
            one.start()
        try:
            wait_for(lambda: len(answers(answer="same", loaded=True)) >= 3, 60, "three right answers under load")
            assert not [e for e in monitor.events if e["event"] in ("corruption_declared", "verdict")]
            served.arm("output.corrupt:rate=0.5,min_running=2")
            verdict = monitor.wait("verdict", 60)
            assert verdict["verdict"] == "health_lies" and "seeded canary" in verdict["evidence"][0]["text"]
        finally:
            stop.set()
            for one in busy:
                one.join(30)


def test_idle_loading_and_slow_servers_raise_nothing(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, *ENGINE) as served, watching(served, tmp_path) as monitor:
        monitor.wait("state", 20)
        served.arm("decode.slow:factor=20")
        served.complete(max_tokens=100)
        threading.Event().wait(5.0)  # idle for longer than the stall time
        served.arm("health.lie")
        served.complete(max_tokens=20)
        with contextlib.suppress(AssertionError):
            monitor.wait("never", 0.2)
        names = {event["event"] for event in monitor.events}
        assert not names & {"stall_declared", "verdict", "page", "captured"}, monitor.events
