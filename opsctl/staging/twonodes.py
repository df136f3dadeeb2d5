"""Two real systemd nodes, and one tensor-parallel group of the engine laid out on them as the packaged unit: ranks 0 and 1 on
node a, rank 2 on node b. Each node has its own network namespace, journal and sshd; the operator sits in a third namespace and
reaches the nodes over ssh, as the fleet file says.

What is served and how it is asked is the affair of whoever derives from ``TwoNodes``.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opsctl.staging import nodes
from opsctl.staging.nodes import SystemdNode
from opsctl.staging.waiting import StageError

RANKS = ((0, 1), (2,))
LETTERS = "ab"
OPERATOR, LEADER = "10.77.0.1", "10.77.0.11"
API_PORT = 30000
URL = f"http://{LEADER}:{API_PORT}"
ROOT = Path(__file__).resolve().parents[2]
_GROUP_PORT = 29500
_TEMPLATE = ROOT / "engine" / "launch" / "lastbatch@.service"
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


class TwoNodes:
    """``deployment``: its name, and the instance of the packaged unit. ``nodes`` are a and b once they are booted."""

    deployment: str
    nodes: tuple[SystemdNode, ...]
    url = URL

    @property
    def unit(self) -> str:
        return unit_of(self.deployment)

    @property
    def run_dir(self) -> str:
        """On each node, from its root on."""
        return f"run/lastbatch/{self.deployment}"

    def home(self, rank: int) -> SystemdNode:
        return self.nodes[0 if rank in RANKS[0] else 1]

    def box_of(self, rank: int) -> Path:
        return self.home(rank).root / self.run_dir / f"rank-{rank}.box"

    def install(self, node: SystemdNode, number: int, args: Sequence[str], cache: Path, settings: str = "") -> None:
        """The packaged unit, and what a site writes beside it. ``args``: of the engine, beside those of the layout; ``cache``: where
        the default model and the compiled parts are already; ``settings``: further lines of [Service]. Raises StageError."""
        layout = ["--tp", "3", "--nnodes", "2", "--node-rank", str(number), "--dist-init-addr", f"{LEADER}:{_GROUP_PORT}",
                  "--host", "0.0.0.0", "--port", str(API_PORT), "--name", self.deployment, "--threads-per-rank", "1"]  # fmt: skip
        command = " ".join([sys.executable, "-m", "engine.cli", "serve", *layout, *args])
        (node.root / "etc/systemd/system" / _TEMPLATE.name).write_text(_TEMPLATE.read_text())
        self.drop_in(node, "10-serve.conf", f"ExecStart=\nExecStart={command}\nEnvironment=PYTHONPATH={ROOT} XDG_CACHE_HOME={cache} "
                                            f"OMP_NUM_THREADS=1\n{settings}")  # fmt: skip

    def drop_in(self, node: SystemdNode, name: str, settings: str) -> None:
        """Raises StageError."""
        folder = node.root / f"etc/systemd/system/{self.unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"[Service]\n{settings}")
        done = node.run(["systemctl", "daemon-reload"])
        if done.code:
            raise StageError(f"node {node.name}: systemctl daemon-reload: {done.err}")

    def begin(self) -> None:
        """Start both units; returns before they are ready. Raises StageError."""
        for node in self.nodes:
            done = node.run(["systemctl", "start", "--no-block", self.unit])
            if done.code:
                raise StageError(f"node {node.name}: systemctl start {self.unit}: {done.err}")

    def show(self, name: str) -> list[str]:
        """A property of the unit, on each node."""
        return [node.run(["systemctl", "show", "-P", name, self.unit]).out.decode().strip() for node in self.nodes]

    def states(self) -> list[str]:
        return self.show("ActiveState")

    def text_of(self, node: SystemdNode, *, lines: int = 0) -> str:
        """The unit's journal, or its last ``lines``."""
        last = ["-n", str(lines)] if lines else []
        command = ["journalctl", "-u", self.unit, "-o", "short-precise", "--no-hostname", "--no-pager", *last]
        return node.run(command, deadline_s=30).out.decode(errors="replace")

    def cut_down(self) -> None:
        """Whatever state the units are in, nothing of them goes on: a frozen or wedged rank does not stop in order, a restart that
        waits must not come, and nobody waits. A node that is gone keeps none of the others."""
        for node in self.nodes:
            with contextlib.suppress(OSError, RuntimeError):
                node.run(["systemctl", "kill", "-s", "KILL", self.unit])
                node.run(["systemctl", "stop", "--no-block", self.unit])


def unit_of(deployment: str) -> str:
    return f"lastbatch@{deployment}.service"


def fleet_nodes(deployment: str, folder: Path) -> str:
    """The fleet file's tables of the two nodes, reached by the ssh configuration in ``folder``."""
    return "".join(
        f'[[deployment.{deployment}.node]]\nname = "{name}"\nssh = "-F {folder / "ssh_config"} n{number + 1}"\n'
        f'python = "{sys.executable}"\n[[deployment.{deployment}.node.service]]\nunit = "{unit_of(deployment)}"\n'
        f"ranks = {list(RANKS[number])}\n"
        for number, name in enumerate(LETTERS)
    )


def cache_of(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def prepare(folder: Path, env: dict[str, str] | None = None) -> Path:
    """The operator's ssh key and ``ssh_config`` in ``folder``; the engine's compiled parts. Returns the key. Raises StageError."""
    key = folder / "id"
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], 20)
    (folder / "ssh_config").write_text(_SSH.format(key=key))
    _run([sys.executable, "-m", "engine.cli", "build"], _BUILD_S, env)
    return key


@contextlib.contextmanager
def booted(prefix: str, folder: Path, key: Path, share: Sequence[Path] = ()) -> Iterator[tuple[SystemdNode, ...]]:
    """The network, whose operator's namespace is ``PREFIX-ctl``, and both nodes on it; also what a failed boot left is undone.
    Raises CalledProcessError."""
    with contextlib.ExitStack() as undo:
        undo.callback(nodes.fabric, "down", prefix, len(LETTERS))
        nodes.fabric("up", prefix, len(LETTERS))
        made = []
        for number, name in enumerate(names(prefix), 1):
            undo.callback(SystemdNode(name, 0, folder).stop)
            made.append(nodes.boot(name, folder, netns=f"{prefix}-{number}", share=share, hook="sshd.sh", env={"NODES_KEY": str(key)}))
        yield tuple(made)


def names(prefix: str) -> tuple[str, ...]:
    """Of the nodes, on this machine."""
    return tuple(f"{prefix}{letter}" for letter in LETTERS)


def _run(command: list[str], deadline_s: float, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, check=False, cwd=ROOT,
                          env=env)  # fmt: skip
    if done.returncode:
        raise StageError(f"{' '.join(command[:3])}: exit status {done.returncode}: {done.stderr.strip()[-600:]}")
