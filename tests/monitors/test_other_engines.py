"""Engines that write no black box: what metrics and log lines say together, and what a server that is gone does not."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import daemon, fleet
from monitors.capture import bundle
from monitors.judge.progress import Limits
from monitors.status import StatusServer
from tests.monitors.cluster import ROOT, Web, until, web

IDLE = 'vllm:num_requests_running{e="0"} 0\nvllm:num_requests_waiting{e="0"} 0\nvllm:generation_tokens_total 5\n'
BUSY = 'vllm:num_requests_running{e="0"} 2\nvllm:num_requests_waiting{e="0"} 1\nvllm:generation_tokens_total %d\n'


class Bench:
    """A Watch of a vLLM deployment that the test turns by hand."""

    def __init__(self, folder: Path, server: Web, stall_s: float = 3.0) -> None:
        self.log = folder / "server.log"
        self.log.touch()
        text = f'[deployment.v]\nengine = "vllm"\napi = "{server.url}"\nservice = "embedded"\nwatchdog_s = 30\n'
        text += f'[[deployment.v.node]]\nname = "a"\n[[deployment.v.node.service]]\nunit = "v"\nlog = "{self.log}"\nranks = [0]\n'
        self.server = server
        self.stall_s = stall_s
        self.events: list[dict[str, Any]] = []
        self.fleet = fleet.parse(text, "fleet.toml")
        options = daemon.Options(Limits(stall_s), 0.1, folder / "state", folder / "bundles")
        self.watch = daemon.Watch(self.fleet, self.fleet.one(), options, self.events.append)

    def page(self, text: str) -> None:
        self.server.pages["/metrics"] = (200, text)

    def turn_until(self, event: str, deadline_s: float = 40.0, **fields: Any) -> dict[str, Any]:
        def turned() -> dict[str, Any] | None:
            self.watch.turn()
            wanted = [e for e in self.events if e["event"] == event and all(e[k] == v for k, v in fields.items())]
            return wanted[-1] if wanted else None

        found: dict[str, Any] = until(turned, f"{event} {fields}; so far {self.events}", deadline_s)
        return found

    def turn_for(self, seconds: float, turn: Callable[[], object] | None = None) -> None:
        """Let the watch look for a while: what must not happen has that long to happen."""
        end = time.monotonic() + seconds

        def passed() -> bool:
            (turn or self.watch.turn)()
            return time.monotonic() > end

        until(passed, "the time passes", seconds + 30)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with web({"/metrics": (200, IDLE), "/health": (200, "")}) as server:
        made = Bench(tmp_path, server)
        try:
            yield made
        finally:
            made.watch.close()


def test_flat_counters_under_held_requests_are_a_stall_and_the_engine_process_is_dumped(bench: Bench, tmp_path: Path) -> None:
    code = (
        "import setproctitle, time\nsetproctitle.setproctitle('VLLM::EngineCore')\ndef get_response():\n    time.sleep(600)\nget_response()"
    )
    engine = subprocess.Popen([sys.executable, "-c", code])
    try:
        bench.turn_until("state", state="idle")
        bench.page(BUSY % 9)
        bench.turn_until("state", state="busy")
        verdict = bench.turn_until("verdict")
    finally:
        engine.kill()
        engine.wait()
    assert verdict["verdict"] in ("hang_unknown", "hang_control_plane"), verdict
    assert bench.named("stall_declared")[0]["quiet_s"] >= 3
    assert bench.turn_until("page")["page_sent"] is False, "nobody is named in the fleet file, and that is said"
    folder = Path(verdict["bundle"])
    assert bundle.verify(folder).ok
    dumped = list(folder.glob(f"pyspy-enginecore_{engine.pid}.*json"))
    assert dumped and "get_response" in dumped[0].read_text()
    assert any("black box" in gap["reason"] or "black_box" in gap["what"] for gap in verdict["missing"])
    for tokens in (10, 11):  # one sign of life is not enough
        bench.page(BUSY % tokens)
        bench.turn_for(2.5)
    bench.turn_until("recovered")


def test_counters_that_grow_are_no_stall_although_no_line_comes(bench: Bench) -> None:
    tokens = itertools.count(5)

    def turned() -> None:
        bench.page(BUSY % next(tokens))
        bench.watch.turn()

    bench.turn_for(2.5 * bench.stall_s, turned)
    assert "busy" in [event["state"] for event in bench.named("state")] and not bench.named("stall_declared")


def test_a_server_that_is_gone_is_unknown_and_its_last_gauges_hold_nothing(tmp_path: Path) -> None:
    with web({"/metrics": (200, BUSY % 7)}) as server:
        made = Bench(tmp_path, server, stall_s=2.0)
        made.turn_until("state", state="busy")
    try:
        made.turn_until("state", state="unknown")
        assert "refused" in json.dumps(made.watch.status["gaps"])
        made.turn_for(2 * made.stall_s)
        assert not made.named("stall_declared")
    finally:
        made.watch.close()


def test_a_bundle_folder_that_cannot_be_written_is_told_and_the_watch_goes_on(tmp_path: Path) -> None:
    (tmp_path / "bundles").write_text("a file where a folder should be")
    with web({"/metrics": (200, BUSY % 7)}) as server:
        made = Bench(tmp_path, server, stall_s=1.0)
        try:
            failed = made.turn_until("error")
            assert "capture failed" in failed["text"] and made.turn_until("page")["page_sent"] is False
            for tokens in (8, 9):  # one sign of life is not enough
                server.pages["/metrics"] = (200, BUSY % tokens)
                made.turn_for(2.5)
            made.turn_until("recovered")
        finally:
            made.watch.close()


def test_the_status_page_speaks_json_and_prometheus() -> None:
    from monitors.observe import metrics

    shown = [{"deployment": "v", "state": "busy", "held": 2.0, "quiet_s": 0.5}]
    server = StatusServer(0, lambda: shown, {"state": 3})
    try:
        answer = metrics.fetch(f"http://127.0.0.1:{server.port}/", deadline_s=5).value
        assert answer is not None and json.loads(answer)["deployments"] == shown
        text = (metrics.fetch(f"http://127.0.0.1:{server.port}/metrics", deadline_s=5).value or b"").decode()
        assert 'hang_monitor_state{deployment="v",state="busy"} 1' in text and 'hang_monitor_events_total{event="state"} 3' in text
        assert "404" in metrics.fetch(f"http://127.0.0.1:{server.port}/x", deadline_s=5).reason
        seen = subprocess.run([sys.executable, "-m", "monitors.cli", "status", "--url", f"http://127.0.0.1:{server.port}/"],
                              cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
        assert json.loads(seen.stdout)["deployments"] == shown
    finally:
        server.close()


def test_wrong_invocations_are_usage_errors_that_say_what_to_do(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from monitors.cli import app
    from monitors.exit_codes import ExitCode

    file = tmp_path / "fleet.toml"
    file.write_text('[deployment.v]\nengine = "vlm"\napi = "http://x"\nnode = []\n')
    runner = CliRunner()
    wrong = runner.invoke(app, ["run", "--fleet", str(file)])
    assert wrong.exit_code == ExitCode.USAGE and 'did you mean "vllm"' in wrong.stderr
    assert runner.invoke(app, ["run", "--fleet", str(file), "--stall-s", "0"]).exit_code == ExitCode.USAGE
    assert runner.invoke(app, ["status", "--url", "http://127.0.0.1:9/"]).exit_code == ExitCode.UNREACHABLE
    assert runner.invoke(app, ["version"]).exit_code == ExitCode.DONE
