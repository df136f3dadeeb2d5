"""One tensor-parallel group of three ranks of the real engine, as systemd units on two real nodes: two ranks on node a
and one on node b, each node with its own network namespace, journal and sshd; the operator sits in a third namespace.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from engine import blackbox
from opsctl.staging.twonodes import ROOT, URL, TwoNodes, booted, cache_of, fleet_nodes, prepare, unit_of
from tests.e2e import nodes
from tests.e2e.serving import wait_for
from tests.e2e.test_monitor_on_engine import Monitor
from tests.tiny_models import tiny_model

DEPLOYMENT = "tiny"
UNIT = unit_of(DEPLOYMENT)
MODEL = "srv/tiny"
RUN_DIR = "run/lastbatch/tiny"
WATCHDOG_S = 90
ENGINE = ("--speculative-algorithm", "NGRAM", "--enable-overlap-schedule", "--context-length", "4096", "--max-total-tokens", "8192",
          "--watchdog-timeout", str(WATCHDOG_S), "--health-max-age", "3", "--drain-timeout", "3", "--enable-faults")  # fmt: skip
HOMES = ((0, "a"), (1, "a"), (2, "b"))
CONSTRAINED = {"messages": [{"role": "user", "content": "a b a b a b"}], "temperature": 0, "max_tokens": 200, "regex": "(ab){20,90}"}
T = TypeVar("T")


class Group(TwoNodes):
    """Two booted nodes with the unit on each. What it makes is undone by ``undo``, also when making it failed.

    Args:
        more: arguments of the engine beside ``ENGINE``.
        fleet: keys of the deployment beside those that the fleet file has anyway.
    """

    deployment = DEPLOYMENT

    def __init__(self, folder: Path, undo: contextlib.ExitStack, more: Sequence[str] = (), fleet: str = "") -> None:
        self.folder = folder
        self._keys = fleet
        self._prefix = prefix = f"lbe{os.getpid()}"
        self._here = ("ip", "netns", "exec", f"{prefix}-ctl")
        key = prepare(folder)
        self.nodes = undo.enter_context(booted(prefix, folder / "nodes", key))
        undo.enter_context(self._inside(f"{prefix}-ctl"))
        for rank, node in enumerate(self.nodes):
            tiny_model(node.root / MODEL, heads=6, kv_heads=3, hidden=96, max_position_embeddings=8192)
            self._install(node, rank, more)
        self.pages_file = folder / "pages"
        self.pages_file.touch()
        self._start_pager(undo)
        self.fleet = folder / "fleet.toml"
        self.fleet.write_text(self._fleet_text())

    def _install(self, node: nodes.SystemdNode, number: int, more: Sequence[str]) -> None:
        self.install(node, number, ["--model", f"/{MODEL}", *ENGINE, *more], cache_of(os.environ), "RestartSec=1\n")

    def _fleet_text(self) -> str:
        return (
            f'[deployment.tiny]\nengine = "lastbatch"\napi = "{URL}"\nwatchdog_s = {WATCHDOG_S}\nallow_faults = true\n'
            f'stable_s = 1\n{self._keys}{fleet_nodes(DEPLOYMENT, self.folder)}[page]\nurls = ["json://10.77.0.1:9000/"]\n'
        )

    # The operator's side.

    @contextlib.contextmanager
    def _inside(self, netns: str) -> Iterator[None]:
        """A thread that lives in the operator's network namespace, for requests from this process."""
        handle = os.open(f"/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)

        def enter() -> None:
            if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):  # CLONE_NEWNET, of this thread alone
                raise OSError(ctypes.get_errno(), "setns")

        try:
            with concurrent.futures.ThreadPoolExecutor(4, initializer=enter) as self._operator:
                yield
        finally:
            os.close(handle)

    def there(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run something as the operator."""
        return self._operator.submit(call)

    def get(self, route: str) -> httpx.Response:
        return self.there(lambda: httpx.get(URL + route, timeout=5, trust_env=False)).result(10)

    def ask(self, body: dict[str, Any], timeout_s: float = 30.0) -> concurrent.futures.Future[httpx.Response]:
        limits = httpx.Timeout(timeout_s, connect=3)
        return self.there(lambda: httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=limits, trust_env=False))

    def serves(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/health_scheduler").status_code == 200
        return False

    def wait_serving(self, deadline_s: float = 60.0) -> None:
        with self._explained():
            wait_for(lambda: self.serves() and self.states() == ["active", "active"], deadline_s, "service")

    def complete(self) -> str:
        answer = self.ask({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True})
        found = answer.result(40)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["completion_tokens"] == 8
        return str(found.json()["system_fingerprint"])

    def command(self, module: str, *words: str) -> list[str]:
        return [*self._here, sys.executable, "-m", module, *words, "--fleet", str(self.fleet), "--json"]

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state"), "PYTHONUNBUFFERED": "1"}

    def opsctl(self, *words: str, deadline_s: float = 120.0) -> tuple[int, dict[str, Any], str]:
        """(exit code, envelope, progress)."""
        done = subprocess.run(self.command("opsctl.cli", *words), cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=deadline_s)  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def _start_pager(self, undo: contextlib.ExitStack) -> None:
        sink = subprocess.Popen([*self._here, sys.executable, ROOT / "tests/opsctl/page_sink.py", "10.77.0.1", "9000", self.pages_file])
        undo.callback(sink.wait, 10)
        undo.callback(sink.kill)

    def pages(self) -> list[str]:
        return [json.loads(line)["title"] for line in self.pages_file.read_text().splitlines()]

    @contextlib.contextmanager
    def watching(self, stall_s: float | None = None) -> Iterator[Monitor]:
        """The monitor on the operator's side; without ``stall_s`` with the times that it comes with."""
        words = ["run", "--state-dir", str(self.folder / "state"), "--bundle-dir", str(self.folder / "bundles")]
        words += ["--stall-s", str(stall_s)] if stall_s else []
        with (self.folder / "monitor.log").open("w") as log:
            process = subprocess.Popen(self.command("monitors.cli", *words), cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=log, text=True)  # fmt: skip
        monitor = Monitor(process, self.folder / "bundles")
        try:
            yield monitor
        except AssertionError as error:
            raise AssertionError(f"{error}; the monitor said: {(self.folder / 'monitor.log').read_text()[-3000:]}") from error
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            monitor.reader.join(10)
            assert process.stdout is not None
            process.stdout.close()

    # The nodes' side.

    def start(self, *, wait: bool = True) -> None:
        self.begin()
        if wait:
            self.wait_serving()

    def configure(self, more: Sequence[str] = (), fleet: str = "") -> None:
        """Other arguments beside ``ENGINE`` and other keys of the fleet file, from the next start on."""
        self._keys = fleet
        self.fleet.write_text(self._fleet_text())
        for rank, node in enumerate(self.nodes):
            self._install(node, rank, more)

    def end(self) -> None:
        """Whatever state the units are in: nothing of them runs afterwards, and they can be started again."""
        self.cut_down()
        with self._explained():
            wait_for(lambda: not {"active", "activating", "deactivating"} & set(self.states()), 60, "the end of both units")
        for node in self.nodes:
            node.run(["systemctl", "reset-failed", UNIT])
            node.run(["sh", "-c", "journalctl -q --rotate && journalctl -q --vacuum-time=1s"])

    def forget(self, name: str) -> None:
        """A folder of the monitor's: what it keeps of incidents, or bundles."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    @contextlib.contextmanager
    def cut_off_in_capture(self, root: Path) -> Iterator[None]:
        """Node b is cut off as soon as a new bundle below ``root`` holds its black box, and is back afterwards."""
        before = set(root.glob("*/rank-2.box"))
        wait_for(lambda: set(root.glob("*/rank-2.box")) - before, 60, "node b's black box in a bundle")
        self.link(1, up=False)
        try:
            yield
        finally:
            self.link(1, up=True)

    def link(self, number: int, *, up: bool) -> None:
        """A node's cable: down is a partition between it and everybody else."""
        word = "up" if up else "down"
        subprocess.run(["ip", "-n", f"{self._prefix}-ctl", "link", "set", f"v{number + 1}", word], check=True, timeout=10)

    def stop(self) -> None:
        for node in self.nodes:
            assert node.run(["systemctl", "stop", "--no-block", UNIT]).code == 0
        with self._explained():
            wait_for(lambda: not {"active", "deactivating"} & set(self.states()), 60, "the end of both units")
            assert self.states() == ["inactive", "inactive"], "a clean stop is no failure"

    def box(self, rank: int) -> blackbox.Snapshot:
        return blackbox.read(self.box_of(rank))

    def digests(self) -> list[str]:
        """What every rank says that it runs, by its box and by the server."""
        served = [one["config_digest"] for one in self.get("/server_info").json()["ranks"]]
        return [*served, *(self.box(rank).header.config_digest for rank in range(3))]

    def written(self) -> list[list[str]]:
        """The files by which opsctl changes the unit, on each node."""
        return [
            node.run(["find", f"/etc/systemd/system/{UNIT}.d", f"/run/systemd/system/{UNIT}.d", "-name", "zz-*"]).out.decode().split()
            for node in self.nodes
        ]

    @staticmethod
    def remains(node: nodes.SystemdNode) -> list[str]:
        """What there is of the unit on a node: processes, cgroup, run directory, shared memory, its own /tmp."""
        processes = node.run(["ps", "-eo", "pid,args"]).out.decode().splitlines()
        look = f'find /sys/fs/cgroup -name "{UNIT}"; find /{RUN_DIR} /dev/shm -mindepth 1; ls -d /tmp/systemd-private-*'
        places = node.run(["sh", "-c", look]).out.decode()
        return [line for line in processes if "lastbatch" in line or "engine" in line] + places.splitlines()

    def journals(self) -> str:
        return "\n".join(self.text_of(node) for node in self.nodes)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """An assertion that fails in here shows how it stands on the nodes."""
        try:
            yield
        except AssertionError as error:
            tails = "\n".join(self.text_of(node)[-6000:] for node in self.nodes)
            raise AssertionError(f"{error}; the units are {self.states()}; their journals end in:\n{tails}") from error

    def rank_pid(self, rank: int) -> tuple[nodes.SystemdNode, int]:
        """The node of a rank, and its pid in there."""
        node = self.home(rank)
        described = json.loads((node.root / RUN_DIR / "launcher.json").read_text())
        return node, next(int(one["pid"]) for one in described["ranks"] if one["rank"] == rank)

    @staticmethod
    def kill(node: nodes.SystemdNode, pid: int, number: signal.Signals) -> None:
        assert pid > 1
        assert node.run(["kill", f"-{number.name.removeprefix('SIG')}", str(pid)]).code == 0
