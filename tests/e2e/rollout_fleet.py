"""One group of the contract server over two real systemd nodes, reached by ssh over a network that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opsctl.rollout import journal
from tests.e2e import nodes
from tests.opsctl.site import ROOT, SERVER, wait_until

PORT = 30000
UNIT = "lb.service"


class Fleet:
    """Two nodes behind a bridge, and an operator in the bridge's own network namespace. ``args``: more of the server's
    arguments; ``prefix``: of names on this machine, one for each fleet that lives at a time."""

    def __init__(self, folder: Path, *, args: Sequence[str] = ("--crash-sequential",), prefix: str = "lbroll") -> None:
        self.folder, self.prefix, self.state = folder, prefix, "state"
        self.here = ("ip", "netns", "exec", f"{prefix}-ctl")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id"], check=True)
        nodes.fabric("up", prefix, 2)
        self.nodes = [
            nodes.boot(f"{prefix}{i}", folder / "nodes", netns=f"{prefix}-{i}", hook="sshd.sh", env={"NODES_KEY": str(folder / "id")})
            for i in (1, 2)
        ]
        (folder / "ssh_config").write_text(
            f"Host n1\n  HostName 10.77.0.11\nHost n2\n  HostName 10.77.0.12\nHost *\n  User root\n  IdentityFile {folder / 'id'}\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        for rank, node in enumerate(self.nodes):
            argv = [sys.executable, str(SERVER), "serve", "--host", "0.0.0.0", "--tp", "2", "--nnodes", "2", "--node-rank", str(rank),
                    "--dist-init-addr", "10.77.0.11:1", *args]  # fmt: skip
            (node.root / "etc/systemd/system" / UNIT).write_text(
                f"[Service]\nType=notify\nExecStart={' '.join(argv)}\nRuntimeDirectory=lb\nKillMode=mixed\nTimeoutStopSec=5\n"
                "Restart=on-failure\nRestartSec=0.5\n"
            )
            node.run(["systemctl", "daemon-reload"])
            node.run(["systemctl", "start", UNIT])
        self.pages_file = folder / "pages"
        self.pages_file.touch()
        self.sink = subprocess.Popen([*self.here, sys.executable, ROOT / "tests/opsctl/page_sink.py", "10.77.0.1", "9000", self.pages_file])
        services = "".join(
            f"[[deployment.d.node]]\nname = 'n{rank + 1}'\nssh = '-F {folder / 'ssh_config'} n{rank + 1}'\n"
            f"[[deployment.d.node.service]]\nunit = '{UNIT}'\nranks = [{rank}]\n"
            for rank in (0, 1)
        )
        (folder / "fleet.toml").write_text(
            f"[deployment.d]\nengine = 'lastbatch'\napi = 'http://10.77.0.11:{PORT}'\nstable_s = 0.5\n{services}"
            "[page]\nurls = ['json://10.77.0.1:9000/']\n"
        )

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        """opsctl, as an operator whose state lies in the folder ``state``."""
        return self._spawn([*self.here, *self._opsctl(words)])

    def spawn_on(self, node: nodes.SystemdNode, *words: str) -> subprocess.Popen[str]:
        env = [f"{key}={value}" for key, value in self._env.items()]
        return self._spawn([*node.enter, "env", "-C", str(ROOT), *env, *self._opsctl(words)])

    @property
    def _env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / self.state)}

    def _opsctl(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "opsctl.cli", "rollout", *words, "--fleet", str(self.folder / "fleet.toml"), "--json"]

    def _spawn(self, argv: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv, cwd=ROOT, env=self._env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    @contextlib.contextmanager
    def operator_node(self) -> Iterator[nodes.SystemdNode]:
        """A third node, in the operator's network, that sees this fleet's folder."""
        node = nodes.boot(f"{self.prefix}op", self.folder / "nodes", netns=f"{self.prefix}-ctl", share=[self.folder])
        try:
            yield node
        finally:
            node.stop()

    @contextlib.contextmanager
    def soaking(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """An apply in its stability window."""
        before = len(self.journals())
        process = self.spawn("apply", "--yes", *words)
        try:
            wait_until(
                lambda: (len(self.journals()) > before and self.reached("soaking")) or process.poll() is not None,
                60,
                "the stability window",
            )
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()
            self.last_words = process.communicate(timeout=10)
            print(*self.last_words)

    def rollout(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """(exit code, envelope, progress)."""
        process = self.spawn(*words)
        out, err = process.communicate(timeout=120)
        return process.returncode, json.loads(out), err

    def apply(self, *words: str) -> tuple[int, dict[str, Any], str]:
        return self.rollout("apply", "--yes", "--boot-deadline-s", "15", *words)

    def argv(self, node: nodes.SystemdNode, unit: str = UNIT) -> list[str]:
        """What a unit's main process runs, empty when there is none."""
        pid = node.run(["systemctl", "show", "-P", "MainPID", unit]).out.decode().strip()
        return node.run(["cat", f"/proc/{pid}/cmdline"]).out.decode().split("\0")[:-1] if pid != "0" else []

    def drop_ins(self) -> list[list[str]]:
        return [node.run(["systemctl", "show", "-P", "DropInPaths", UNIT]).out.decode().split() for node in self.nodes]

    def pages(self) -> list[str]:
        return [json.loads(line)["title"] for line in self.pages_file.read_text().splitlines()]

    def all_run(self, flag: str) -> bool:
        return all(flag in self.argv(node) for node in self.nodes)

    def none_runs(self, flag: str) -> bool:
        found = [self.argv(node) for node in self.nodes]
        return all(argv and flag not in argv for argv in found)

    def journals(self) -> list[Path]:
        return journal.all_of(self.folder / "state/lastbatch/rollouts/d")

    def reached(self, state: str) -> bool:
        return f'"state":"{state}"'.encode() in self.journals()[-1].read_bytes()

    def cut(self, node: int) -> None:
        """No packet to or from this node (0 or 1)."""
        subprocess.run(["ip", "-n", f"{self.prefix}-ctl", "link", "set", f"v{node + 1}", "down"], check=True)

    def mend(self, node: int) -> None:
        subprocess.run(["ip", "-n", f"{self.prefix}-ctl", "link", "set", f"v{node + 1}", "up"], check=True)

    def close(self) -> None:
        if hasattr(self, "sink"):
            self.sink.kill()
            self.sink.wait()
        for node in getattr(self, "nodes", []):
            node.stop()
        nodes.fabric("down", self.prefix, 2)
