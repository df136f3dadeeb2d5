"""The always-on loop against real processes: declared, captured, judged and paged once; nothing for what is no wedge."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import casefolder
from monitors.capture import bundle
from tests.monitors.cluster import HEALTHY, ROOT, Cluster, fleet_text, until, web


class Monitor:
    """``hang-monitor run --json`` in a process of its own; ``events`` fills as it speaks."""

    def __init__(self, folder: Path, fleet_file: Path, stall_s: float = 1.5, listen: bool = True) -> None:
        argv = [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(fleet_file), "--stall-s", str(stall_s), "--poll-s", "0.1",
                "--state-dir", str(folder / "state"), "--bundle-dir", str(folder / "bundles"), "--status-port", "0", "--json"]  # fmt: skip
        self.process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, Any]] = []
        self.talk: list[str] = []
        readers = (self._read, self._hear) if listen else (self._hear,)
        self._threads = [threading.Thread(target=reader) for reader in readers]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def _hear(self) -> None:
        assert self.process.stderr is not None
        self.talk.extend(self.process.stderr)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def states(self) -> list[str]:
        return [event["state"] for event in self.named("state")]

    def wait(self, name: str, deadline_s: float = 40.0) -> dict[str, Any]:
        found: list[dict[str, Any]] = until(lambda: self.named(name), f"event {name}; so far {self.events}", deadline_s)
        return found[-1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def receiver() -> Iterator[Any]:
    with web() as server:
        yield server


def write_fleet(folder: Path, cluster: Cluster, api: str, receiver: Any, more: str = "") -> Path:
    file = folder / "fleet.toml"
    file.write_text(fleet_text([("a", cluster.run_dir, cluster.log)], api, f"json://127.0.0.1:{receiver.port}/", more=more))
    return file


def test_a_wedge_is_declared_captured_judged_paged_once_and_acted_on(tmp_path: Path, receiver: Any) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        more = 'on_wedge = { action = "restart" }'  # of a service that nobody started: opsctl says so, and the wedge stays
        monitor = Monitor(tmp_path, write_fleet(tmp_path, cluster, server.url, receiver, more))
        try:
            until(lambda: "loading" in monitor.states(), "the monitor sees the ranks load")
            cluster.wedge("grammar")
            page, acted = monitor.wait("page"), monitor.wait("acted")
            steps = ("suspicion", "stall_declared", "captured", "verdict", "page", "acting", "acted")
            assert [e["event"] for e in monitor.events if e["event"] in steps] == list(steps)
            assert acted["ok"] is False and "no such service" in acted["said"]
            assert monitor.states()[-1] == "stalled" and "busy" in monitor.states()
            verdict = monitor.wait("verdict")
            assert verdict["verdict"] == "hang_grammar_barrier" and verdict["runbook"] == "runbooks/hang_grammar_barrier.md"
            folder = Path(monitor.wait("captured")["bundle"])
            assert bundle.verify(folder).ok
            assert json.loads((folder / "suspicion.json").read_text())["ranks"]
            assert page["page_sent"] is True
            assert "hang_grammar_barrier" in receiver.posted[0]["title"] and str(folder) in receiver.posted[0]["message"]
        finally:
            assert monitor.stop() == 0

        # The same wedge, a monitor that starts again: seen, and not paged a second time.
        again = Monitor(tmp_path, tmp_path / "fleet.toml")
        try:
            until(lambda: "stalled" in again.states(), "the second monitor sees the stall")
            assert not again.named("stall_declared") and not again.named("page") and not again.named("acting")
            assert len(receiver.posted) == 1
        finally:
            assert again.stop(signal.SIGINT) == 130


def test_idle_loading_and_slow_servers_raise_nothing(tmp_path: Path, receiver: Any) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        monitor = Monitor(tmp_path, write_fleet(tmp_path, cluster, server.url, receiver), stall_s=1.0)
        try:
            for mode, state in (("load", "loading"), ("idle", "idle"), ("busy", "busy"), ("slow", "slow"), ("idle", "idle")):
                cluster.tell(mode)
                until(lambda state=state: monitor.states() and monitor.states()[-1] == state, f"{state} is seen; {monitor.events}", 40)
                if mode == "busy":  # "slow" is a word about the server's own past, so it needs one
                    until(lambda: cluster.boxes()[0].host.step > 900, "a past to compare with", 60)
            assert not monitor.named("stall_declared") and not monitor.named("captured") and not receiver.posted
            assert "stalled" not in monitor.states()
        finally:
            assert monitor.stop() == 0


def test_a_killed_rank_pages_as_a_crash_and_a_restart_is_watched_on(tmp_path: Path, receiver: Any) -> None:
    with web(HEALTHY) as server:
        with Cluster(tmp_path, invocation="aa" * 16) as cluster:
            monitor = Monitor(tmp_path, write_fleet(tmp_path, cluster, server.url, receiver))
            cluster.work()
            until(lambda: "busy" in monitor.states(), "the monitor sees work")
            for process in cluster.ranks:
                process.kill()
            assert monitor.wait("verdict")["verdict"] == "crash"
            assert monitor.wait("page")["page_sent"] is True
        try:
            for path in cluster.run_dir.glob("rank-*.box"):
                path.unlink()
            with Cluster(tmp_path, invocation="bb" * 16) as second:
                until(lambda: monitor.named("restarting_notice"), f"the restart is noted while it loads; {monitor.events}")
                assert monitor.named("restarted") and not monitor.named("recovery_notice")
                second.work()
                until(lambda: monitor.named("recovery_notice"), f"and its end, when it serves; {monitor.events}")
                second.wedge("symmetric")
                until(lambda: len(monitor.named("page")) == 2, f"the wedge of the second invocation pages; {monitor.events}", 40)
                assert monitor.named("verdict")[-1]["verdict"] == "hang_symmetric_spin"
        finally:
            assert monitor.stop() == 0


def test_markup_in_answers_is_declared_captured_and_judged_again_from_its_bundle(tmp_path: Path, receiver: Any) -> None:
    counters = 'lastbatch:parse_failures_total {}\nlastbatch:http_requests_total{{route="/v1/chat/completions",status="200"}} {}\n'
    pages = {**HEALTHY, "/metrics": (200, counters.format(3, 400))}
    with web(pages) as server, Cluster(tmp_path) as cluster:
        monitor = Monitor(tmp_path, write_fleet(tmp_path, cluster, server.url, receiver))
        try:
            cluster.work()
            until(lambda: server.asked.count("/metrics") > 1, "the monitor has read the counters of before")
            server.pages["/metrics"] = (200, counters.format(13, 412))
            assert "10 of 12 answers" in monitor.wait("leak_declared")["text"]
            verdict = monitor.wait("verdict")
            assert verdict["verdict"] == "parser_leak" and monitor.wait("page")["page_sent"] is True
            assert casefolder.judge(Path(verdict["bundle"])).verdict.value == "parser_leak"
        finally:
            assert monitor.stop() == 0


def test_a_wedge_that_comes_while_the_one_before_is_captured_has_its_own_bundle_and_both_page(tmp_path: Path, receiver: Any) -> None:
    with web(HEALTHY) as server:
        with Cluster(tmp_path, world=1, invocation="aa" * 16) as first:
            monitor = Monitor(tmp_path, write_fleet(tmp_path, first, server.url, receiver), stall_s=0.5)
            first.wedge("symmetric")
            monitor.wait("stall_declared")
        try:
            (first.run_dir / "rank-0.box").unlink()
            with Cluster(tmp_path, world=1, invocation="bb" * 16) as second:
                second.wedge("symmetric")
                until(lambda: len(monitor.named("stall_declared")) == 2, f"the second wedge is declared; {monitor.events}")
                until(lambda: len(monitor.named("captured")) == 2, f"and captured; {monitor.events}")
                until(lambda: any("bb" * 16 in page for page in map(str, monitor.named("stall_declared"))), "under its own key")
                until(lambda: len([event for event in monitor.named("page") if event["page_sent"]]) == 2, f"both paged; {monitor.events}")
            folders = [Path(event["bundle"]) for event in monitor.named("captured")]
            assert len(set(folders)) == 2 and all(bundle.verify(folder).ok for folder in folders)
        finally:
            assert monitor.stop() == 0


def test_a_page_that_cannot_go_out_is_said(tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        file = tmp_path / "fleet.toml"
        file.write_text(fleet_text([("a", cluster.run_dir, cluster.log)], server.url, "json://127.0.0.1:9/"))
        monitor = Monitor(tmp_path, file)
        try:
            cluster.wedge("symmetric")
            page = monitor.wait("page")
            assert page["page_sent"] is False and "127.0.0.1:9" in page["reason"]
        finally:
            assert monitor.stop() == 0


def test_a_monitor_whose_reader_has_gone_still_captures_and_pages(tmp_path: Path, receiver: Any) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        monitor = Monitor(tmp_path, write_fleet(tmp_path, cluster, server.url, receiver), listen=False)
        try:
            assert monitor.process.stdout is not None
            monitor.process.stdout.close()
            cluster.wedge("symmetric")
            until(lambda: receiver.posted, "the page arrives", 40)
            (folder,) = (tmp_path / "bundles").iterdir()
            assert bundle.verify(folder).ok
        finally:
            assert monitor.stop() == 0
