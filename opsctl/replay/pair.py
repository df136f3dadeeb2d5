"""One tensor-parallel group of the engine as systemd units on two nodes: ranks 0 and 1 on node a, rank 2 on node b.

Each node is a real systemd with its own network namespace, journal and sshd; the operator sits in a third namespace and
reaches the nodes over ssh, as the fleet file says.
"""

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
from opsctl.staging.waiting import StageError, wait_for
from opsctl.staging.watcher import Watcher

DEPLOYMENT = "flash"
UNIT = f"lastbatch@{DEPLOYMENT}.service"
RANKS = ((0, 1), (2,))
_ROOT = Path(__file__).resolve().parents[2]
_TEMPLATE = _ROOT / "engine" / "launch" / "lastbatch@.service"
_RUN_DIR = f"run/lastbatch/{DEPLOYMENT}"
_OPERATOR, _LEADER = "10.77.0.1", "10.77.0.11"
_API_PORT, _GROUP_PORT = 30000, 29500
_BUILD_S = 120.0
_SSH = """Host n1
  HostName 10.77.0.11
Host n2
  HostName 10.77.0.12
Host *
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


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
class Pair:
    """The booted nodes and who looks at them. ``nodes`` are a and b."""

    folder: Path
    env: Mapping[str, str]
    serving: Serving
    nodes: tuple[SystemdNode, ...]
    pages: list[str] = field(default_factory=list)

    url = f"http://{_LEADER}:{_API_PORT}"

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

    def box(self, rank: int) -> Path:
        node = self.nodes[0 if rank in RANKS[0] else 1]
        return node.root / _RUN_DIR / f"rank-{rank}.box"

    def begin(self) -> None:
        """Start both units; returns before they are ready. Raises StageError."""
        for node in self.nodes:
            done = node.run(["systemctl", "start", "--no-block", UNIT])
            if done.code:
                raise StageError(f"node {node.name}: systemctl start {UNIT}: {done.err}")

    def states(self) -> list[str]:
        return [node.run(["systemctl", "show", "-P", "ActiveState", UNIT]).out.decode().strip() for node in self.nodes]

    def wait_active(self, deadline_s: float) -> None:
        """Until systemd calls both units active, which the launcher tells it after a real completion. Raises StageError, also
        when a unit has failed for good."""

        def active() -> bool:
            states = self.states()
            if "failed" in states:
                raise StageError(f"{UNIT} has failed")
            return states == ["active"] * len(self.nodes)

        try:
            wait_for(active, deadline_s, f"{UNIT} to be active on both nodes", poll_s=0.5)
        except StageError as error:
            tails = "\n".join(self.log(node, lines=30) for node in self.nodes)
            raise StageError(f"{error}; the nodes' units are {self.states()}; their logs end in:\n{tails}") from error

    def journal(self, node: SystemdNode, *, last_s: float) -> list[dict[str, Any]]:
        """The unit's entries of the last seconds, the manager's own among them, as journalctl gives them. Raises StageError."""
        command = ["journalctl", "-u", UNIT, "-o", "json", "--no-pager", "--all", "--since", f"-{max(1, round(last_s))}s"]
        done = node.run(command, deadline_s=30)
        if done.code:
            raise StageError(f"node {node.name}: {' '.join(command)}: {done.err}")
        return [json.loads(line) for line in done.out.splitlines()]

    def log(self, node: SystemdNode, *, lines: int) -> str:
        command = ["journalctl", "-u", UNIT, "-o", "short-precise", "--no-hostname", "--no-pager", "-n", str(lines)]
        return node.run(command).out.decode(errors="replace")

    def keep_logs(self) -> None:
        """The nodes are gone with the replay; what their units said stays in its folder."""
        for name, node in zip("ab", self.nodes, strict=True):
            with contextlib.suppress(OSError, RuntimeError):
                command = ["journalctl", "-u", UNIT, "-o", "short-precise", "--no-hostname", "--no-pager"]
                (self.folder / "log" / f"node-{name}.log").write_bytes(node.run(command, deadline_s=30).out)

    def end(self) -> None:
        """Whatever state the units are in, nothing of them goes on: a wedged rank does not stop in order, and nobody waits."""
        for node in self.nodes:
            with contextlib.suppress(OSError, RuntimeError):
                node.run(["systemctl", "kill", "-s", "KILL", UNIT])
                node.run(["systemctl", "stop", "--no-block", UNIT])


@contextlib.contextmanager
def pair(serving: Serving, env: Mapping[str, str], folder: Path, on_page: Callable[[str], None]) -> Iterator[Pair]:
    """Two nodes with the unit installed and not yet started; this thread lives in the operator's namespace meanwhile.

    What was made is undone in any case, by the sweeper when this process is killed. Raises StageError, OSError and
    CalledProcessError.
    """
    prefix = f"lbr{os.getpid()}"
    names = tuple(f"{prefix}{letter}" for letter in "ab")
    for name in ("log", "nodes", "playbooks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    key = folder / "id"
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], 20)
    (folder / "ssh_config").write_text(_SSH.format(key=key))
    made = Pair(folder, _operator_env(env, folder), serving, ())
    _run([sys.executable, "-m", "engine.cli", "build"], _BUILD_S, made.env)
    with sweeper.guarded(prefix, folder / "nodes", names), contextlib.ExitStack() as undo:
        for file in (key, key.with_suffix(".pub")):
            undo.callback(file.unlink, missing_ok=True)
        undo.callback(nodes.clear, folder / "nodes")
        undo.callback(nodes.fabric, "down", prefix, len(names))
        nodes.fabric("up", prefix, len(names))
        for number, name in enumerate(names):
            undo.callback(SystemdNode(name, 0, folder / "nodes").stop)
            node = nodes.boot(name, folder / "nodes", netns=f"{prefix}-{number + 1}", share=_shared(serving, env), hook="sshd.sh",
                              env={"NODES_KEY": str(key)})  # fmt: skip
            _install(node, number, serving, env)
            made.nodes = (*made.nodes, node)
        undo.enter_context(nodes.inside(f"{prefix}-ctl"))

        def paged(title: str) -> None:
            made.pages.append(title)
            on_page(title)

        pager = Pager(paged, host=_OPERATOR)
        undo.callback(pager.close)
        made.fleet.write_text(fleet_text(serving, folder, pager.port))
        undo.callback(made.end)
        undo.callback(made.keep_logs)
        yield made


def _install(node: SystemdNode, number: int, serving: Serving, env: Mapping[str, str]) -> None:
    """The packaged unit, and what a site writes beside it."""
    units = node.root / "etc/systemd/system"
    (units / _TEMPLATE.name).write_text(_TEMPLATE.read_text())
    (units / f"{UNIT}.d").mkdir()
    args = ["--tp", "3", "--nnodes", "2", "--node-rank", str(number), "--dist-init-addr", f"{_LEADER}:{_GROUP_PORT}", "--host", "0.0.0.0",
            "--port", str(_API_PORT), "--name", DEPLOYMENT, "--threads-per-rank", "1", "--watchdog-timeout", str(serving.watchdog_s),
            *(("--model", serving.model) if serving.model else ()), *serving.args]  # fmt: skip
    command = " ".join([sys.executable, "-m", "engine.cli", "serve", *args])
    # PrivateTmp would hide a checkout that lies below /tmp.
    (units / f"{UNIT}.d" / "10-serve.conf").write_text(
        f"[Service]\nExecStart=\nExecStart={command}\nPrivateTmp=no\n"
        f"Environment=PYTHONPATH={_ROOT} XDG_CACHE_HOME={_cache(env)} OMP_NUM_THREADS=1\n"
    )
    done = node.run(["systemctl", "daemon-reload"])
    if done.code:
        raise StageError(f"node {node.name}: systemctl daemon-reload: {done.err}")


def fleet_text(serving: Serving, folder: Path, pager_port: int) -> str:
    services = "".join(
        f'[[deployment.{DEPLOYMENT}.node]]\nname = "{name}"\nssh = "-F {folder / "ssh_config"} n{number + 1}"\n'
        f'python = "{sys.executable}"\n[[deployment.{DEPLOYMENT}.node.service]]\nunit = "{UNIT}"\nranks = {list(RANKS[number])}\n'
        for number, name in enumerate("ab")
    )
    return (
        f"# Written by `opsctl drill run`: a deployment of its own on two systemd nodes.\n[deployment.{DEPLOYMENT}]\n"
        f'engine = "lastbatch"\napi = "{Pair.url}"\nwatchdog_s = {serving.watchdog_s}\nallow_faults = true\n'
        f'boot_deadline_s = {serving.boot_s}\nstable_s = {serving.stable_s:g}\nbundle_dir = "{folder}/bundles"\n{services}'
        f'[page]\nurls = ["json://{_OPERATOR}:{pager_port}/"]\n'
    )


def _operator_env(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**python_path_env(env), "XDG_STATE_HOME": str(folder / "state"), "PYTHONUNBUFFERED": "1"}


def _cache(env: Mapping[str, str]) -> Path:
    """Where the default model and the compiled C parts are already."""
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def _shared(serving: Serving, env: Mapping[str, str]) -> list[Path]:
    """What the units need and an overlay of / does not show: folders on other file systems."""
    needed = [_ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), _cache(env).resolve()]
    needed += [Path(serving.model).resolve()] if serving.model else []
    root = Path("/").stat().st_dev
    return [path for path in dict.fromkeys(needed) if path.exists() and path.stat().st_dev != root]


def _run(command: list[str], deadline_s: float, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, check=False,
                          env=None if env is None else dict(env))  # fmt: skip
    if done.returncode:
        raise StageError(f"{' '.join(command[:3])}: exit status {done.returncode}: {done.stderr.strip()[-600:]}")
