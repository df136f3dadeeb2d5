"""Where a drill is played: a server that is booted for it, or a staging deployment that allows faults."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors import fleet, keyfile
from monitors.exit_codes import ExitCode
from monitors.fleet import Deployment
from opsctl.drill import lifter
from opsctl.playbooks.actions import Place
from opsctl.playbooks.schema import Change, Drill
from opsctl.playbooks.server import Deployed
from opsctl.rollout import flags, target
from opsctl.service.manager import Override
from opsctl.staging.callers import CallerWatch, table
from opsctl.staging.clients import CONSTRAINED, AgentLoop, Loop, ScanLoop, ToolLoop, ask
from opsctl.staging.command import envelope
from opsctl.staging.gateway import Gateway
from opsctl.staging.site import DEPLOYMENT, SCAN, Layout, python_path_env, site
from opsctl.staging.waiting import StageError, wait_for
from opsctl.staging.watcher import Watcher

RANKS = 3
_COMMON = ("--context-length", "4096", "--max-total-tokens", "16384", "--drain-timeout", "3", "--enable-faults")
_BOOT_S = 150.0
_DEADLINE_S = 90  # of a boot in a rollout, several times what one takes: a boot that hangs is waited for so long
_CANARY_S = 2.0
_FALLS_BACK_ON = (400,)  # a gateway that takes a refusal for a failure
_LOOPS: Mapping[str, Sequence[type[Loop]]] = {"agents": (AgentLoop, AgentLoop), "scan": (ScanLoop,), "tools": (ToolLoop,)}


@dataclass
class Stage:
    """A server that works, with a monitor that watches it. ``pages`` are what was sent to people: the monotonic second at
    which it came, title and text."""

    fleet_path: str
    deployment: Deployment
    env: dict[str, str]
    folder: Path
    server: Deployed
    watcher: Watcher
    pages: list[tuple[float, str, str]]
    own: bool
    changed: bool = False  # its configuration is not what it was booted with
    gateway: Gateway | None = None  # by which the clients come
    callers: CallerWatch | None = None  # whether they are served here

    def clients(self, kind: str) -> Traffic:
        file = self.deployment.api_key_file
        url = self.gateway.base if self.gateway is not None else self.deployment.api
        return Traffic(url, kind, key=keyfile.read(file) if file else "")

    def opsctl(self, *words: str, deadline_s: float) -> dict[str, Any]:
        """The JSON envelope of an opsctl command on this deployment. Raises StageError."""
        where = ("--fleet", self.fleet_path, "--deployment", self.deployment.name)
        return envelope((*words, *where), self.env, self.folder / "opsctl.log", deadline_s)

    def can_play(self, drill: Drill) -> None:
        """Raises StageError when this is no stage for it."""
        name = self.deployment.name
        if drill.by_hand is not None and not self.own:
            raise StageError(
                f"deployment.{name}: a change past every guard is made only on an engine that is booted for it; leave out --fleet"
            )
        if drill.server and not self.own:
            runs = {word for manager in target.of(self.deployment, self.fleet_path, self.env).managers for word in manager.command().argv}
            if lacks := [word for word in drill.server if word not in runs]:
                raise StageError(f"deployment.{name}: this drill needs a server with {' '.join(drill.server)}; it lacks {' '.join(lacks)}")
        if drill.gateway and self.gateway is None:
            raise StageError(f"deployment.{name}: this drill needs a gateway of its own before the server; leave out --fleet")
        if drill.outdated and not self.own:
            raise StageError(f"deployment.{name}: this drill needs a monitor with an outdated fleet file; leave out --fleet")
        if drill.canary and not self.deployment.canary.load_every_s:
            raise StageError(f"deployment.{name}.canary: this drill needs load_every_s = 2, so that answers under load are compared")

    def change_by_hand(self, change: Change) -> None:
        """What the next start runs with, written past every guard. It starts nothing."""
        self.changed = True
        for manager in target.of(self.deployment, self.fleet_path, self.env).managers:
            now = manager.command()
            manager.restore(Override(flags.edit(now.argv, change.edits()), dict(change.env), now.mounts))

    def boxes(self) -> list[Path]:
        """The black boxes of the ranks on this machine."""
        here = [service.run_dir for node in self.deployment.node if not node.ssh for service in node.service]
        return sorted(box for folder in here for box in Path(folder).glob("rank-*.box"))

    def configuration(self) -> str:
        """The digest of what each rank here runs with; of several when they differ, empty when none can be read."""
        found = set()
        for box in self.boxes():
            with contextlib.suppress(OSError, blackbox.BoxError):
                found.add(blackbox.read(box, events=False).header.config_digest)
        return "+".join(sorted(found))

    def stopped_pid(self) -> str:
        """The pid of the rank that stands in state T on this machine. Raises StageError when there is none."""
        for box in self.boxes():
            pid = blackbox.read(box, events=False).header.pid
            with contextlib.suppress(OSError):
                if "\nState:\tT" in Path(f"/proc/{pid}/status").read_text():
                    return str(pid)
        raise StageError("no rank's process on this machine stands in state T")


@dataclass
class Traffic:
    """Clients beside which it happens: agents that talk without end, and one that wants JSON once the fault is armed; or one
    that wants JSON all the time, or one that uses tools."""

    url: str
    kind: str
    key: str = field(default="", repr=False)
    loops: list[Loop] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        for kind in _LOOPS.get(self.kind, (AgentLoop,)):
            loop = kind(self.url, key=self.key)
            loop.start()
            self.loops.append(loop)
        wait_for(lambda: self.completed >= len(self.loops), 120, "a turn of the clients")

    def provoke(self) -> None:
        if self.kind == "agent-and-json":
            thread = threading.Thread(target=lambda: ask(self.url, CONSTRAINED, timeout_s=120, key=self.key), daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def discerns(self) -> bool:
        """Whether a good turn says that the configuration is right."""
        return bool(self.loops) and all(loop.discerns for loop in self.loops)

    @property
    def completed(self) -> int:
        return sum(loop.completed for loop in self.loops)

    def good_after(self, second: float) -> float | None:
        """The monotonic second of the first turn that was completed after ``second``."""
        return min((at for loop in self.loops for at in loop.good_at if at > second), default=None)

    def end(self) -> None:
        for loop in self.loops:
            loop.stop()
        for thread in self._threads:
            thread.join(5)


@contextlib.contextmanager
def booted(drill: Drill, env: Mapping[str, str], talk: Callable[[str], None], folder: Path, model: str = "") -> Iterator[Stage]:
    """A server of its own, with the flags that the drill asks for, verified by real completions."""
    pages: list[tuple[float, str, str]] = []
    layout = Layout("drill", (*_COMMON, *drill.server), nodes=(tuple(range(RANKS)),), model=model,
                    boot_s=_DEADLINE_S, canary_s=_CANARY_S if drill.canary else 0.0, callers="" if drill.gateway else SCAN)  # fmt: skip

    def paged(title: str, text: str) -> None:
        pages.append((time.monotonic(), title, text))

    with contextlib.ExitStack() as held:
        made = held.enter_context(site(layout, python_path_env(env), lambda title: None, folder, on_text=paged))
        gateway = None
        if drill.gateway:
            gateway = held.enter_context(contextlib.closing(Gateway(made.url, falls_back_on=_FALLS_BACK_ON)))
            made.add_to_fleet(table(DEPLOYMENT, "scan", CONSTRAINED, "json", via=gateway.url))
        talk(f"booting the engine on {RANKS} ranks ({' '.join(drill.server) or 'no flags beyond the common ones'}); logs: {folder}/log")
        made.begin()
        made.wait_ready(_BOOT_S)
        watcher = partial(made.monitor, made.outdated() if drill.outdated else None)
        stage = held.enter_context(_watched(str(made.fleet), DEPLOYMENT, made.env, folder, pages, own=True, watcher=watcher))
        verified = stage.opsctl("rollout", "verify", deadline_s=240)
        if verified["exit_code"] != ExitCode.DONE:
            raise StageError(f"the server that was booted is not well: {verified['errors'] or verified['data']}")
        if gateway is not None:
            stage.gateway, stage.callers = gateway, held.enter_context(contextlib.closing(made.caller_watch()))
        yield stage


@contextlib.contextmanager
def staged(fleet_path: str, deployment: str, env: Mapping[str, str], folder: Path) -> Iterator[Stage]:
    """A deployment that is there already. The caller has seen that it allows faults, which do not outlive this process, however
    it ends. Pages go to its own people."""
    folder.mkdir(parents=True, exist_ok=True)

    def monitor() -> Watcher:
        command = [sys.executable, "-m", "monitors.cli", "run", "--fleet", fleet_path, "--deployment", deployment, "--json", "--state-dir",
                   str(folder / "monitor")]  # fmt: skip
        with (folder / "hang-monitor.log").open("w") as log:
            return Watcher(
                subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
            )

    with (
        _watched(fleet_path, deployment, dict(env), folder, [], own=False, watcher=monitor) as stage,
        lifter.guarded(fleet_path, deployment, stage.env, stage.watcher.process.pid),
    ):
        yield stage


@contextlib.contextmanager
def _watched(fleet_path: str, name: str, env: dict[str, str], folder: Path, pages: list[tuple[float, str, str]], *, own: bool,
             watcher: Callable[[], Watcher]) -> Iterator[Stage]:  # fmt: skip
    whole = fleet.load(fleet_path)
    chosen = whole.one(name)
    server = Deployed(whole, chosen, Place(fleet_path, name, chosen.api, chosen.api_key_file, env))
    watching = watcher()
    try:
        yield Stage(fleet_path, chosen, env, folder, server, watching, pages, own)
    finally:
        watching.close()
        server.close()


def moment(seed: int | None, least_s: float = 0.5, most_s: float = 3.0) -> float:
    """After how many seconds of traffic it happens."""
    return random.Random(seed).uniform(least_s, most_s)
