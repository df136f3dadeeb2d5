"""Real systemd nodes for tests: systemd and journald as PID 1 of their own namespaces, booted in about a second."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monitors.remote import Done, Remote

_HERE = Path(__file__).parent


def missing(*, ssh: bool = False) -> str:
    """Why nodes cannot be booted here; empty when they can."""
    if os.geteuid():
        return "systemd nodes need root"
    if not Path("/lib/systemd/systemd").exists():
        return "systemd nodes need systemd installed"
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "systemd nodes need util-linux"
    if ssh and not Path("/usr/sbin/sshd").exists():
        return "ssh between nodes needs openssh-server installed"
    if ssh and (shutil.which("ssh") is None or shutil.which("ip") is None):
        return "ssh between nodes needs openssh-client and iproute2 installed"
    return ""


@dataclass(frozen=True)
class SystemdNode:
    """A booted node. ``pid`` is its init as the host numbers it."""

    name: str
    pid: int
    folder: Path

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--"]

    @property
    def root(self) -> Path:
        """Its file system as the host sees it."""
        return Path(f"/proc/{self.pid}/root")

    def run(self, command: Sequence[str], *, deadline_s: float = 20.0, stdin: bytes = b"") -> Done:
        """The shape of ``monitors.remote.Remote.run``, by entering the node instead of over ssh."""
        from monitors.fleet import Node

        return Remote(Node(name=self.name)).run([*self.enter, *command], deadline_s=deadline_s, stdin=stdin)

    def power_off(self) -> None:
        """As a cut cable does: its init is killed and everything in it with it. ``stop`` clears up afterwards."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        subprocess.run([_HERE / "stop.sh", self.name], env=_env(self.folder, {}), check=True, timeout=30)


def boot(
    name: str, folder: Path, *, netns: str = "", share: Sequence[Path] = (), hook: str = "", env: dict[str, str] | None = None
) -> SystemdNode:
    """Raises CalledProcessError when the node does not boot; its console is in the error's stderr."""
    more = {"NODES_SHARE": " ".join(str(path) for path in share), "NODES_HOOK": str(_HERE / hook) if hook else "", **(env or {})}
    done = subprocess.run([_HERE / "start.sh", name, netns], env=_env(folder, more), check=True, timeout=40, capture_output=True, text=True)
    found = re.search(r"NODE_PID=(\d+)", done.stdout)
    assert found, done.stdout
    return SystemdNode(name, int(found[1]), folder)


def fabric(verb: str, prefix: str, count: int) -> None:
    subprocess.run([_HERE / "fabric.sh", verb, prefix, str(count)], check=True, timeout=20, capture_output=True)


def _env(folder: Path, more: dict[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "NODES_DIR": str(folder), **more}
