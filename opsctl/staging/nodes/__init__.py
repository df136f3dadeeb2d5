"""Real systemd nodes on one machine: systemd and journald as PID 1 of their own namespaces, booted in about a second."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monitors.fleet import Node
from monitors.remote import Done, Remote

_HERE = Path(__file__).parent
_CLONE_NEWNET = 0x40000000


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
    return _unshared()


def _unshared() -> str:
    """Root in a container may still make no namespaces: only a trial tells."""
    trial = ["unshare", "--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--net", "true"]
    try:
        done = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "systemd nodes need namespaces of their own, and unshare did not end within 10 s"
    return f"systemd nodes need namespaces of their own: {done.stderr.strip() or 'unshare failed'}" if done.returncode else ""


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
        return Remote(Node(name=self.name)).run([*self.enter, *command], deadline_s=deadline_s, stdin=stdin)

    def power_off(self) -> None:
        """As a cut cable does: its init is killed and everything in it with it. ``stop`` clears up afterwards."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Also of a node that is not up, or only half: what is left of it goes."""
        subprocess.run(["bash", _HERE / "stop.sh", self.name], env=_env(self.folder, {}), check=True, timeout=30)


def boot(
    name: str, folder: Path, *, netns: str = "", share: Sequence[Path] = (), hook: str = "", env: Mapping[str, str] | None = None
) -> SystemdNode:
    """Raises CalledProcessError when the node does not boot; its console is in the error's stderr."""
    more = {"NODES_SHARE": " ".join(str(path) for path in share), "NODES_HOOK": str(_HERE / hook) if hook else "", **(env or {})}
    done = subprocess.run(["bash", _HERE / "start.sh", name, netns], env=_env(folder, more), check=True, timeout=40, capture_output=True,
                          text=True)  # fmt: skip
    found = re.search(r"NODE_PID=(\d+)", done.stdout)
    assert found, done.stdout
    return SystemdNode(name, int(found[1]), folder)


def clear(folder: Path) -> None:
    """Take the nodes' folder away once they are stopped. Where the machine had no cgroup v2, their first boot mounted one in it."""
    cgroup = folder / "cgroup"
    if cgroup.is_mount():
        subprocess.run(["umount", cgroup], check=True, timeout=10, capture_output=True)
    for path in (cgroup, folder):
        with contextlib.suppress(OSError):  # what is not empty stays, to be looked at
            path.rmdir()


def fabric(verb: str, prefix: str, count: int) -> None:
    """``up`` or ``down``: the nodes' network, and the operator's namespace ``PREFIX-ctl`` on it."""
    subprocess.run(["bash", _HERE / "fabric.sh", verb, prefix, str(count)], check=True, timeout=20, capture_output=True)


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """This thread, and the threads and processes that it starts meanwhile, live in a network namespace. Raises OSError."""
    with (
        Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open("rb") as home,
        Path(f"/run/netns/{netns}").open("rb") as there,
    ):
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _env(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "NODES_DIR": str(folder), **more}
