"""A deployment on this machine: one tensor-parallel group on one or more "nodes", each an embedded service, and its monitor."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from monitors import fleet
from opsctl.pid import started
from opsctl.rollout import target
from opsctl.service.manager import ServiceError, State
from opsctl.staging.callers import CallerWatch, table
from opsctl.staging.command import envelope
from opsctl.staging.heir import Heir, heir
from opsctl.staging.pager import Pager
from opsctl.staging.waiting import StageError, wait_for
from opsctl.staging.watcher import Watcher

DEPLOYMENT = "flash"
_ENGINE = (sys.executable, "-m", "engine.cli", "serve")
_STARTS = 2  # restarts after which a boot is given up
_END_S = 240.0  # a lease of 60 s, and a boot behind it
_FLEET = """# Written by `opsctl {what}`: one deployment of its own on this machine.
[deployment.{name}]
engine = "lastbatch"
api = "http://127.0.0.1:{port}"
watchdog_s = {watchdog}
service = "embedded"
allow_faults = true
boot_deadline_s = {boot}
stable_s = {stable}
bundle_dir = "{folder}/bundles"
{nodes}
{callers}{canary}[page]
urls = ["json://127.0.0.1:{pager}/"]
"""
SCAN = table(
    DEPLOYMENT, "scan", {"messages": [{"role": "user", "content": "one item as JSON"}], "response_format": {"type": "json_object"}}, "json",
    never_live=True,
)  # fmt: skip
_CANARY = "[deployment.{name}.canary]\nload_every_s = {every}\n"
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


@dataclass(frozen=True)
class Layout:
    """What is served and how it is watched. ``nodes``: the ranks of each "node"; ``args``: flags of the engine beside those
    that follow from the layout; ``canary_s``: how often the monitor compares a seeded answer under load (0: never);
    ``callers``: the clients, as TOML."""

    what: str
    args: Sequence[str]
    nodes: Sequence[Sequence[int]]
    model: str = ""
    watchdog_s: int = 60
    stall_s: float = 5.0
    boot_s: int = 150
    stable_s: int = 5
    canary_s: float = 0.0
    callers: str = SCAN

    @property
    def world(self) -> int:
        return sum(len(ranks) for ranks in self.nodes)


class Site:
    """Everything that is started. ``folder`` keeps logs, bundles and journals; sockets lie in a short-lived one."""

    def __init__(self, folder: Path, env: Mapping[str, str], pager: Pager, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        self.heir: Heir | None = None
        self.port = _free_ports(1)
        self.sockets = Path(tempfile.mkdtemp(prefix="lastbatch-"))
        self._status_port = _free_ports(1)
        self.env = {
            **env,
            "OPSCTL_MONITOR": f"http://127.0.0.1:{self._status_port}",
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(self.sockets),
            "PYTHONUNBUFFERED": "1",
        }
        self.fleet = folder / "fleet.toml"
        names = "abcdefgh"[: len(layout.nodes)]
        self.units = tuple(f"{DEPLOYMENT}-{name}" for name in names)
        self.home = {rank: unit for unit, ranks in zip(self.units, layout.nodes, strict=True) for rank in ranks}
        group = ["--tp", str(layout.world)]
        if len(layout.nodes) > 1:
            group += ["--nnodes", str(len(layout.nodes)), "--dist-init-addr", f"127.0.0.1:{_free_ports(4)}"]
        group += ["--model", layout.model] if layout.model else []
        nodes = ""
        for at, (unit, ranks) in enumerate(zip(self.units, layout.nodes, strict=True)):
            own = ["--port", str(self.port), "--run-dir", f"{folder}/run/{unit}", "--name", unit]
            own += ["--node-rank", str(at)] if len(layout.nodes) > 1 else []
            args = [*group, "--watchdog-timeout", str(layout.watchdog_s), *layout.args, *own]
            nodes += _NODE.format(name=DEPLOYMENT, node=names[at], unit=unit, ranks=list(ranks), folder=folder, args=json.dumps(args),
                                  command=json.dumps(list(_ENGINE)))  # fmt: skip
        (folder / "log").mkdir(parents=True, exist_ok=True)
        canary = _CANARY.format(name=DEPLOYMENT, every=layout.canary_s) if layout.canary_s else ""
        self.fleet.write_text(_FLEET.format(what=layout.what, name=DEPLOYMENT, port=self.port, watchdog=layout.watchdog_s, folder=folder,
                                            nodes=nodes, pager=pager.port, boot=layout.boot_s, stable=layout.stable_s,
                                            canary=canary, callers=layout.callers))  # fmt: skip

    def outdated(self) -> Path:
        """The fleet file as it was when another engine served here. A monitor that goes by it reads the log, which has the
        same form, and knows neither black boxes nor counters nor which processes are ranks."""
        path = self.folder / "fleet-outdated.toml"
        path.write_text(self.fleet.read_text(encoding="utf-8").replace('engine = "lastbatch"', 'engine = "sglang"', 1), encoding="utf-8")
        return path

    def add_to_fleet(self, text: str) -> None:
        """Further tables of the deployment, as TOML."""
        with self.fleet.open("a", encoding="utf-8") as file:
            file.write(text)

    def services(self) -> Sequence[Any]:
        """The embedded services, each on its own."""
        return target.of(fleet.load(self.fleet).one(DEPLOYMENT), str(self.fleet), self.env).managers

    def begin(self) -> None:
        """Start every service; returns before they are ready."""
        for service in self.services():
            service.begin_start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def opsctl(self, *words: str, deadline_s: float, heard: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Run an opsctl command on this deployment, and return its JSON envelope; ``heard`` gets what it says meanwhile. Raises
        StageError."""
        where = ("--fleet", str(self.fleet), "--deployment", DEPLOYMENT)
        return envelope((*words, *where), self.env, self.folder / "log" / "opsctl.log", deadline_s, heard)

    def monitor(self, fleet_path: Path | None = None) -> Watcher:
        """``fleet_path``: another fleet file than the site's own."""
        where = ["--fleet", str(fleet_path or self.fleet), "--state-dir", str(self.folder / "state" / "monitor")]
        command = [sys.executable, "-m", "monitors.cli", "run", *where, "--stall-s", str(self.layout.stall_s), "--json", "--status-port",
                   str(self._status_port)]  # fmt: skip
        with (self.folder / "log" / "hang-monitor.log").open("w") as log:
            process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
        if self.heir is not None:
            self.heir.tell(f"{process.pid} {started(process.pid)}")
        return Watcher(process)

    def caller_watch(self, every_s: float = 1.0, probe_every_s: float = 5.0) -> CallerWatch:
        """It needs what a `rollout verify` has recorded."""
        where = ["--fleet", str(self.fleet), "--deployment", DEPLOYMENT]
        command = [sys.executable, "-m", "opsctl.cli", "callers", "watch", *where, "--every-s", str(every_s), "--probe-every-s",
                   str(probe_every_s), "--json"]  # fmt: skip
        with (self.folder / "log" / "callers-watch.log").open("w") as log:
            process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
        if self.heir is not None:
            self.heir.tell(f"{process.pid} {started(process.pid)}")
        return CallerWatch(process)

    def box(self, rank: int) -> Path:
        return self.folder / "run" / self.home[rank] / f"rank-{rank}.box"

    def wait_ready(self, deadline_s: float) -> None:
        """Raises StageError, also when a service has failed or does nothing but start again."""
        services = self.services()

        def ready() -> bool:
            for service in services:
                seen = service.snapshot()
                if seen.state is State.failed or seen.restarts >= _STARTS:
                    raise StageError(
                        f"{service.name} ended {seen.restarts + 1} times in its boot: {_last_words(self.folder, service.name)}"
                    )
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health_scheduler", timeout=5).status_code == 200
            return False

        wait_for(ready, deadline_s, f"the server to be ready (logs: {self.folder}/log)", poll_s=0.2)

    def close(self) -> None:
        shutil.rmtree(self.sockets, ignore_errors=True)


@contextlib.contextmanager
def site(layout: Layout, env: Mapping[str, str], on_page: Callable[[str], None], folder: Path | None = None, *,
         on_text: Callable[[str, str], None] = lambda title, text: None) -> Iterator[Site]:  # fmt: skip
    """A site in the user's state folder; all that it started is ended when the block is left, whatever happened. ``on_page``
    and ``on_text`` are its ``Pager``'s."""
    if folder is None:
        folder = fleet.state_root(env) / time.strftime(f"{layout.what}-%Y%m%dT%H%M%SZ", time.gmtime())
    folder.mkdir(parents=True)
    pager = Pager(on_page, on_text=on_text)
    try:
        made = Site(folder, env, pager, layout)
        with heir("opsctl.staging.remains", str(made.fleet), DEPLOYMENT, str(made.sockets), env=made.env) as made.heir:
            try:
                yield made
            finally:
                end_all(made.services())
                made.close()
                made.heir.dismiss()
    finally:
        pager.close()


def _last_words(folder: Path, unit: str) -> str:
    """What a service's log says before the words of its supervisor."""
    log = folder / "log" / f"{unit}.log"
    with contextlib.suppress(OSError):
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip() and not line.startswith("[opsctl]")]
        return f"{' / '.join(said[-2:])[-400:] or 'it said nothing'} (log: {log})"
    return f"log: {log}"


def end_all(services: Sequence[Any], deadline_s: float = _END_S) -> bool:
    """End embedded services, and ask again while one is held by a rollout that was cut off: it lets go when its lease is over,
    or when what it reverts to is up. False when one is left at the deadline."""
    until = time.monotonic() + deadline_s
    while left := [service for service in services if not service.ended]:
        if time.monotonic() > until:
            return False
        for service in left:
            with contextlib.suppress(ServiceError, OSError):
                service.end()
        time.sleep(0.2)
    return True


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free now, below those that the kernel itself gives away."""
    for _ in range(50):
        first = random.randint(15_000, 32_000)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise StageError(f"no {count} free ports in a row on 127.0.0.1")


def python_path_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for child processes that import from this tree when it is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))}
