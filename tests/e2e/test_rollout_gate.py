"""Rollouts with a key that may do nothing else on its nodes (docs/least-privilege.md), on real nodes over ssh."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator

import pytest

from opsctl.rollout import gatetext
from opsctl.service.systemd import _WRITE
from tests.e2e import nodes
from tests.e2e.rollout_fleet import UNIT, Fleet

pytestmark = pytest.mark.nodes
GATE = "usr/local/lib/opsctl-gate"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    why = nodes.missing(ssh=True)
    if why:
        pytest.skip(why)
    made = Fleet.__new__(Fleet)
    try:
        made.__init__(tmp_path_factory.mktemp("gated"), prefix="lbgate")  # type: ignore[misc]
        for node in made.nodes:
            (node.root / GATE).write_text(gatetext.text([UNIT]))
            (node.root / GATE).chmod(0o755)
            keys = node.root / "etc/ssh/authorized_keys_test"
            keys.write_text(f'command="/{GATE}",restrict {keys.read_text()}')
        yield made
    finally:
        made.close()


def ssh(fleet: Fleet, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [*fleet.here, "ssh", "-F", str(fleet.folder / "ssh_config"), "n1", *command]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=20, check=False)


def test_a_gated_key_rolls_out_and_reverts(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "disable-overlap-schedule")
    assert code == 3, (err, answer)
    assert [check["outcome"] for check in answer["data"]["revert_checks"]] == ["passed"] * 5
    assert fleet.none_runs("--disable-overlap-schedule")
    said = fleet.nodes[0].run(["journalctl", "-t", "opsctl-gate"]).out
    assert b"refused" not in said, said


def test_the_same_key_does_nothing_else(fleet: Fleet) -> None:
    drop_in = "[Service]\nExecStart=\nExecStart=/bin/true\nUser=root\n"
    folder = f"/run/systemd/system/{UNIT}.d"
    for command, stdin in (
        (("id",), ""),
        (("systemctl", "stop", "ssh.service"), ""),
        (("cat", "/etc/shadow"), ""),
        (("sh", "-c", "'echo hello'"), ""),
        (("python3", "-", "x"), "print(1)"),
        ((shlex.join(["sh", "-c", _WRITE, "opsctl", folder, "zz-opsctl-90-trial.conf", "022"]),), drop_in),
        ((shlex.join(["sh", "-c", _WRITE, "opsctl", "/etc/cron.d", "x", "022"]),), "x"),
    ):
        done = ssh(fleet, *command, stdin=stdin)
        assert done.returncode == 77 and "refused" in done.stderr, (command, done)
