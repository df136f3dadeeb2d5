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
from tests.e2e import nodes
from tests.e2e.serving import wait_for
from tests.e2e.test_monitor_on_engine import Monitor
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "engine/launch/lastbatch@.service"
UNIT = "lastbatch@tiny.service"
MODEL = "srv/tiny"
RUN_DIR = "run/lastbatch/tiny"
LEADER = "10.77.0.11"
URL = f"http://{LEADER}:30000"
WATCHDOG_S = 90
ENGINE = ("--tp", "3", "--nnodes", "2", "--dist-init-addr", f"{LEADER}:29500", "--host", "0.0.0.0", "--port", "30000", "--name", "tiny",
          "--threads-per-rank", "1", "--speculative-algorithm", "NGRAM", "--enable-overlap-schedule",
          "--context-length", "4096", "--max-total-tokens", "8192",
          "--watchdog-timeout", str(WATCHDOG_S), "--health-max-age", "3", "--drain-timeout", "3", "--enable-faults")  # fmt: skip
RANKS = ((0, 1), (2,))
HOMES = ((0, "a"), (1, "a"), (2, "b"))
CONSTRAINED = {"messages": [{"role": "user", "content": "a b a b a b"}], "temperature": 0, "max_tokens": 200, "regex": "(ab){20,90}"}
T = TypeVar("T")


class Group:
    """Two booted nodes with the unit on each. What it makes is undone by ``undo``, also when making it failed.

    Args:
        more: arguments of the engine beside ``ENGINE``.
        fleet: keys of the deployment beside those that the fleet file has anyway.
    """

    def __init__(self, folder: Path, undo: contextlib.ExitStack, more: Sequence[str] = (), fleet: str = "") -> None:
        self.folder = folder
        self._keys = fleet
        self._prefix = prefix = f"lbe{os.getpid()}"
        self._here = ("ip", "netns", "exec", f"{prefix}-ctl")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id"], check=True)
        subprocess.run([sys.executable, "-m", "engine.cli", "build"], cwd=ROOT, check=True, timeout=120, capture_output=True)
        undo.callback(nodes.fabric, "down", prefix, 2)
        nodes.fabric("up", prefix, 2)
        undo.enter_context(self._inside(f"{prefix}-ctl"))
        self.nodes = tuple(self._boot(f"{prefix}{'ab'[rank]}", f"{prefix}-{rank + 1}", undo) for rank in (0, 1))
        for rank, node in enumerate(self.nodes):
            tiny_model(node.root / MODEL, heads=6, kv_heads=3, hidden=96, max_position_embeddings=8192)
            self._install(node, ["--model", f"/{MODEL}", *ENGINE, *more, "--node-rank", str(rank)])
        self.pages_file = folder / "pages"
        self.pages_file.touch()
        self._start_pager(undo)
        self.fleet = folder / "fleet.toml"
        self.fleet.write_text(self._fleet_text())

    def _boot(self, name: str, netns: str, undo: contextlib.ExitStack) -> nodes.SystemdNode:
        undo.callback(nodes.SystemdNode(name, 0, self.folder / "nodes").stop)  # what a failed boot left, too
        env = {"NODES_KEY": str(self.folder / "id")}
        return nodes.boot(name, self.folder / "nodes", netns=netns, hook="sshd.sh", env=env)

    def _install(self, node: nodes.SystemdNode, args: list[str]) -> None:
        """The packaged unit, and what a site writes beside it."""
        units = node.root / "etc/systemd/system"
        (units / TEMPLATE.name).write_text(TEMPLATE.read_text())
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # the C parts are compiled there already
        command = " ".join([sys.executable, "-m", "engine.cli", "serve", *args])
        self.drop_in(node, "10-serve.conf", f"ExecStart=\nExecStart={command}\nEnvironment=PYTHONPATH={ROOT} XDG_CACHE_HOME={cache} "
                                            "OMP_NUM_THREADS=1\nRestartSec=1\n")  # fmt: skip

    @staticmethod
    def drop_in(node: nodes.SystemdNode, name: str, service: str) -> None:
        folder = node.root / f"etc/systemd/system/{UNIT}.d"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"[Service]\n{service}")
        assert node.run(["systemctl", "daemon-reload"]).code == 0

    def _fleet_text(self) -> str:
        (self.folder / "ssh_config").write_text(
            f"Host n1\n  HostName 10.77.0.11\nHost n2\n  HostName 10.77.0.12\nHost *\n  User root\n  IdentityFile {self.folder / 'id'}\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        services = "".join(
            f'[[deployment.tiny.node]]\nname = "{name}"\nssh = "-F {self.folder / "ssh_config"} n{rank + 1}"\npython = "{sys.executable}"\n'
            f'[[deployment.tiny.node.service]]\nunit = "{UNIT}"\nranks = {list(RANKS[rank])}\n'
            for rank, name in enumerate(("a", "b"))
        )
        return (
            f'[deployment.tiny]\nengine = "lastbatch"\napi = "{URL}"\nwatchdog_s = {WATCHDOG_S}\nallow_faults = true\n'
            f'stable_s = 1\n{self._keys}{services}[page]\nurls = ["json://10.77.0.1:9000/"]\n'
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
        for node in self.nodes:
            assert node.run(["systemctl", "start", "--no-block", UNIT]).code == 0
        if wait:
            self.wait_serving()

    def configure(self, more: Sequence[str] = (), fleet: str = "") -> None:
        """Other arguments beside ``ENGINE`` and other keys of the fleet file, from the next start on."""
        self._keys = fleet
        self.fleet.write_text(self._fleet_text())
        for rank, node in enumerate(self.nodes):
            self._install(node, ["--model", f"/{MODEL}", *ENGINE, *more, "--node-rank", str(rank)])

    def end(self) -> None:
        """Whatever state the units are in: nothing of them runs afterwards, and they can be started again."""
        for node in self.nodes:
            # A frozen or wedged rank does not stop in order, and a restart that waits must not come.
            node.run(["systemctl", "kill", "-s", "KILL", UNIT])
            node.run(["systemctl", "stop", "--no-block", UNIT])
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
        return blackbox.read(self.home(rank).root / RUN_DIR / f"rank-{rank}.box")

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

    def home(self, rank: int) -> nodes.SystemdNode:
        return self.nodes[0 if rank in RANKS[0] else 1]

    def show(self, name: str) -> list[str]:
        return [node.run(["systemctl", "show", "-P", name, UNIT]).out.decode().strip() for node in self.nodes]

    def states(self) -> list[str]:
        return self.show("ActiveState")

    def journals(self) -> str:
        return "\n".join(self.journal(node) for node in self.nodes)

    @staticmethod
    def journal(node: nodes.SystemdNode) -> str:
        return node.run(["journalctl", "-o", "short-precise", "--no-hostname", "--no-pager", "-u", UNIT]).out.decode(errors="replace")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """An assertion that fails in here shows how it stands on the nodes."""
        try:
            yield
        except AssertionError as error:
            tails = "\n".join(self.journal(node)[-6000:] for node in self.nodes)
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
