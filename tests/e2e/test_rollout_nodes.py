"""Rollouts of one group over two real systemd nodes, reached by ssh over a network that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e import nodes

from opsctl.rollout import journal
from tests.opsctl.site import ROOT, SERVER, wait_until

pytestmark = pytest.mark.nodes
PREFIX = "lbroll"
PORT = 30000
UNIT = "lb.service"


class Fleet:
    """Two nodes behind a bridge, and an operator in the bridge's own network namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id"], check=True)
        nodes.fabric("up", PREFIX, 2)
        self.nodes = [
            nodes.boot(f"lbroll{i}", folder / "nodes", netns=f"{PREFIX}-{i}", hook="sshd.sh", env={"NODES_KEY": str(folder / "id")})
            for i in (1, 2)
        ]
        (folder / "ssh_config").write_text(
            f"Host n1\n  HostName 10.77.0.11\nHost n2\n  HostName 10.77.0.12\nHost *\n  User root\n  IdentityFile {folder / 'id'}\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        for rank, node in enumerate(self.nodes):
            argv = [sys.executable, str(SERVER), "serve", "--host", "0.0.0.0", "--tp", "2", "--nnodes", "2", "--node-rank", str(rank),
                    "--dist-init-addr", "10.77.0.11:1", "--crash-sequential"]  # fmt: skip
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

    here = ("ip", "netns", "exec", f"{PREFIX}-ctl")

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        argv = [*self.here, sys.executable, "-m", "opsctl.cli", "rollout", *words, "--fleet", str(self.folder / "fleet.toml"), "--json"]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state")}
        return subprocess.Popen(
            argv, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

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

    def argv(self, node: nodes.SystemdNode) -> list[str]:
        """What the unit's main process runs, empty when there is none."""
        pid = node.run(["systemctl", "show", "-P", "MainPID", UNIT]).out.decode().strip()
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

    def close(self) -> None:
        if hasattr(self, "sink"):
            self.sink.kill()
            self.sink.wait()
        for node in getattr(self, "nodes", []):
            node.stop()
        nodes.fabric("down", PREFIX, 2)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    why = nodes.missing(ssh=True)
    if why:
        pytest.skip(why)
    made = Fleet.__new__(Fleet)
    try:
        made.__init__(tmp_path_factory.mktemp("fleet"))  # type: ignore[misc]
        yield made
    finally:
        made.close()


def test_a_crash_on_the_first_decode_is_reverted_on_both_nodes_and_paged(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "disable-overlap-schedule")
    assert code == 3, err
    failed = next(check for check in answer["data"]["checks"] if check["outcome"] == "failed")
    assert failed["data"]["tracebacks"][0].endswith("TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'")
    assert [check["outcome"] for check in answer["data"]["revert_checks"]] == ["passed"] * 5
    assert answer["data"]["page_sent"] is True and fleet.pages() == ["d: rollout reverted"]
    assert fleet.none_runs("--disable-overlap-schedule") and fleet.drop_ins() == [[], []]


def test_a_good_change_is_committed_on_both_nodes_whatever_tracebacks_the_journal_holds_of_before(fleet: Fleet) -> None:
    assert b"Traceback" in fleet.nodes[0].run(["journalctl", "-u", UNIT]).out
    code, answer, err = fleet.apply("--set", "page-size=32")
    assert code == 0, err
    assert {check["name"]: check["outcome"] for check in answer["data"]["checks"]} == dict.fromkeys(
        ("boot", "argv", "ranks", "completion", "log", "steady"), "passed"
    )
    assert fleet.all_run("--page-size")
    assert fleet.drop_ins() == [[f"/etc/systemd/system/{UNIT}.d/zz-opsctl-50.conf"]] * 2


def test_an_unknown_flag_is_refused_by_the_nodes_own_build(fleet: Fleet) -> None:
    code, answer, _ = fleet.apply("--set", "page-sise=32")
    assert code == 2
    assert "page-sise" in answer["errors"][0]["message"]


def test_a_boot_that_never_ends_is_reverted_at_its_deadline(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "never-ready", "--boot-deadline-s", "3")
    assert code == 3, err
    assert "not within 3 s" in answer["data"]["why"]


def test_a_configuration_that_one_node_does_not_run_is_reverted(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "split-rank=1")
    assert code == 3, err
    assert "black box rank 1" in answer["data"]["why"]


def test_killed_and_left_alone_each_node_reverts_by_itself(fleet: Fleet) -> None:
    with fleet.soaking("--set", "max-queued-requests=99", "--stable-s", "60", "--lease-s", "6") as process:
        assert fleet.all_run("--max-queued-requests")
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: fleet.none_runs("--max-queued-requests"), 40, "both nodes to revert")
    assert fleet.drop_ins() == [[f"/etc/systemd/system/{UNIT}.d/zz-opsctl-50.conf"]] * 2
    code, answer, err = fleet.rollout("resume")
    assert code == 3, err
    assert "dead-man" in answer["data"]["why"]


def test_killed_in_the_stability_window_and_resumed_it_is_committed(fleet: Fleet) -> None:
    with fleet.soaking("--set", "max-queued-requests=98", "--stable-s", "3", "--lease-s", "60") as process:
        process.send_signal(signal.SIGKILL)
    code, _, err = fleet.rollout("resume")
    assert code == 0, err
    assert fleet.all_run("--max-queued-requests")


def test_a_node_that_is_cut_off_reverts_alone_and_the_operator_is_paged(fleet: Fleet) -> None:
    link = ["ip", "-n", f"{PREFIX}-ctl", "link", "set", "v2"]
    with fleet.soaking("--set", "max-queued-requests=97", "--stable-s", "60", "--lease-s", "6") as process:
        subprocess.run([*link, "down"], check=True)
        try:
            assert process.wait(timeout=90) == 4
            assert "d: rollout STUCK" in fleet.pages()
            wait_until(lambda: fleet.argv(fleet.nodes[1]) and "97" not in fleet.argv(fleet.nodes[1]), 30, "the cut-off node to revert")
        finally:
            subprocess.run([*link, "up"], check=True)
    until = time.monotonic() + 60
    while (code := fleet.rollout("abort")[0]) != 3 and time.monotonic() < until:
        pass
    assert code == 3
    assert fleet.none_runs("97")
