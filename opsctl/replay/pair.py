"""The group of the engine on two systemd nodes that a day is replayed on: what it serves, who watches it, who asks it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsctl.replay import sweeper
from opsctl.staging import nodes
from opsctl.staging.command import envelope
from opsctl.staging.nodes import SystemdNode
from opsctl.staging.pager import Pager
from opsctl.staging.site import python_path_env
from opsctl.staging.twonodes import LETTERS, OPERATOR, ROOT, URL, TwoNodes, booted, cache_of, fleet_nodes, names, prepare
from opsctl.staging.waiting import StageError, wait_for
from opsctl.staging.watcher import Watcher

DEPLOYMENT = "flash"


@dataclass(frozen=True)
class Serving:
    """What is served and how it is watched. ``args``: flags of the engine beside those that follow from the layout;
    ``boot_s``: the boot deadline of rollouts."""

    args: Sequence[str]
    watchdog_s: int
    stable_s: float
    boot_s: int = 150
    model: str = ""


@dataclass
class Pair(TwoNodes):
    """The booted nodes and who looks at them."""

    folder: Path
    env: Mapping[str, str]
    serving: Serving
    nodes: tuple[SystemdNode, ...]
    pages: list[str] = field(default_factory=list)

    deployment = DEPLOYMENT

    @property
    def fleet(self) -> Path:
        return self.folder / "fleet.toml"

    def add_to_fleet(self, text: str) -> None:
        """Further tables of the deployment, as TOML."""
        with self.fleet.open("a", encoding="utf-8") as file:
            file.write(text)

    def opsctl(self, *words: str, deadline_s: float) -> dict[str, Any]:
        """Run an opsctl command on this deployment, and return its JSON envelope. Raises StageError."""
        where = ("--fleet", str(self.fleet), "--deployment", DEPLOYMENT)
        return envelope((*words, *where), self.env, self.folder / "log" / "opsctl.log", deadline_s)

    def monitor(self, stall_s: float) -> Watcher:
        command = [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(self.fleet), "--stall-s", str(stall_s), "--json",
                   "--state-dir", str(self.folder / "state" / "monitor")]  # fmt: skip
        with (self.folder / "log" / "hang-monitor.log").open("a") as log:
            return Watcher(
                subprocess.Popen(command, env=dict(self.env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
            )

    def wait_active(self, deadline_s: float) -> None:
        """Until systemd calls both units active, which the launcher tells it after a real completion. Raises StageError, also
        when a unit has failed for good."""

        def active() -> bool:
            states = self.states()
            if "failed" in states:
                raise StageError(f"{self.unit} has failed")
            return states == ["active"] * len(self.nodes)

        try:
            wait_for(active, deadline_s, f"{self.unit} to be active on both nodes", poll_s=0.5)
        except StageError as error:
            tails = "\n".join(self.text_of(node, lines=30) for node in self.nodes)
            raise StageError(f"{error}; the nodes' units are {self.states()}; their logs end in:\n{tails}") from error

    def journal(self, node: SystemdNode, *, last_s: float) -> list[dict[str, Any]]:
        """The unit's entries of the last seconds, the manager's own among them, as journalctl gives them. Raises StageError."""
        command = ["journalctl", "-u", self.unit, "-o", "json", "--no-pager", "--all", "--since", f"-{max(1, round(last_s))}s"]
        done = node.run(command, deadline_s=30)
        if done.code:
            raise StageError(f"node {node.name}: {' '.join(command)}: {done.err}")
        return [json.loads(line) for line in done.out.splitlines()]

    def keep_logs(self) -> None:
        """The nodes are gone with the replay; what their units said stays in its folder."""
        for name, node in zip(LETTERS, self.nodes, strict=True):
            with contextlib.suppress(OSError, RuntimeError):
                (self.folder / "log" / f"node-{name}.log").write_text(self.text_of(node))


@contextlib.contextmanager
def pair(serving: Serving, env: Mapping[str, str], folder: Path, on_page: Callable[[str], None]) -> Iterator[Pair]:
    """Two nodes with the unit installed and not yet started; this thread lives in the operator's namespace meanwhile.

    What was made is undone in any case, by the sweeper when this process is killed. Raises StageError, OSError and
    CalledProcessError.
    """
    prefix = f"lbr{os.getpid()}"
    for name in ("log", "nodes", "playbooks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    made = Pair(folder, _operator_env(env, folder), serving, ())
    key = prepare(folder, dict(made.env))
    with sweeper.guarded(prefix, folder / "nodes", names(prefix)), contextlib.ExitStack() as undo:
        for file in (key, key.with_suffix(".pub")):
            undo.callback(file.unlink, missing_ok=True)
        undo.callback(nodes.clear, folder / "nodes")
        made.nodes = undo.enter_context(booted(prefix, folder / "nodes", key, _shared(serving, env)))
        for number, node in enumerate(made.nodes):
            made.install(node, number, _args(serving), cache_of(env), "PrivateTmp=no\n")  # which would hide a checkout that lies below /tmp
        undo.enter_context(nodes.inside(f"{prefix}-ctl"))

        def paged(title: str) -> None:
            made.pages.append(title)
            on_page(title)

        pager = Pager(paged, host=OPERATOR)
        undo.callback(pager.close)
        made.fleet.write_text(fleet_text(serving, folder, pager.port))
        undo.callback(made.cut_down)
        undo.callback(made.keep_logs)
        yield made


def _args(serving: Serving) -> list[str]:
    model = ["--model", serving.model] if serving.model else []
    return ["--watchdog-timeout", str(serving.watchdog_s), *model, *serving.args]


def fleet_text(serving: Serving, folder: Path, pager_port: int) -> str:
    return (
        f"# Written by `opsctl drill run`: a deployment of its own on two systemd nodes.\n[deployment.{DEPLOYMENT}]\n"
        f'engine = "lastbatch"\napi = "{URL}"\nwatchdog_s = {serving.watchdog_s}\nallow_faults = true\n'
        f"boot_deadline_s = {serving.boot_s}\nstable_s = {serving.stable_s:g}\n"
        f'bundle_dir = "{folder}/bundles"\n{fleet_nodes(DEPLOYMENT, folder)}'
        f'[page]\nurls = ["json://{OPERATOR}:{pager_port}/"]\n'
    )


def _operator_env(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**python_path_env(env), "XDG_STATE_HOME": str(folder / "state"), "PYTHONUNBUFFERED": "1"}


def _shared(serving: Serving, env: Mapping[str, str]) -> list[Path]:
    """What the units need and an overlay of / does not show: folders on other file systems."""
    needed = [ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), cache_of(env).resolve()]
    needed += [Path(serving.model).resolve()] if serving.model else []
    root = Path("/").stat().st_dev
    return [path for path in dict.fromkeys(needed) if path.exists() and path.stat().st_dev != root]
