"""The monitor of a unit on a real systemd node: journal, runtime directory and stacks, all through a real ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import daemon, fleet
from monitors.capture import bundle
from monitors.judge.progress import Limits, State
from tests.e2e.nodes import SystemdNode, boot, missing
from tests.monitors.cluster import HEALTHY, HERE, ROOT, until, web

pytestmark = pytest.mark.skipif(bool(missing(ssh=True)), reason=missing(ssh=True) or "-")

UNIT = f"""[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart={sys.executable} {HERE}/smallrank/rank.py /run/small 0 1 "symmetric 40"
Environment=PYTHONPATH={HERE}:{ROOT} PYTHONUNBUFFERED=1 SPT_NOENV=1
RuntimeDirectory=small
Restart=on-failure
RestartSec=300ms
TimeoutStopSec=1
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[SystemdNode, str]]:
    """A node, and what the fleet file's ``ssh`` holds for it: sshd is run inside the node for each connection."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    made = boot("monitored", tmp_path / "nodes", hook="sshd.sh", env={"NODES_KEY": str(key)})
    try:
        inside = " ".join([*made.enter, "/usr/sbin/sshd", "-i"])
        trust = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        yield made, f"-F none -i {key} {trust} -o {shlex.quote(f'ProxyCommand={inside}')} root@monitored"
    finally:
        made.stop()


def test_a_wedged_unit_is_declared_captured_and_followed_through_its_restart(node: tuple[SystemdNode, str], tmp_path: Path) -> None:
    machine, ssh = node
    done = machine.run(["sh", "-c", "cat > /etc/systemd/system/small.service"], stdin=UNIT.encode())
    assert done.code == 0, done.err
    events: list[dict[str, Any]] = []
    with web(HEALTHY) as server:
        text = f'[deployment.small]\nengine = "lastbatch"\napi = "{server.url}"\nwatchdog_s = 60\n'
        text += f'[[deployment.small.node]]\nname = "n"\nssh = """{ssh}"""\npython = "{sys.executable}"\n'
        text += '[[deployment.small.node.service]]\nunit = "small.service"\nranks = [0]\n'
        whole = fleet.parse(text, "fleet.toml")
        options = daemon.Options(Limits(2.0), 0.2, tmp_path / "state", tmp_path / "bundles")
        watch = daemon.Watch(whole, whole.one(), options, events.append)

        def turn_until(name: str) -> dict[str, Any]:
            def turned() -> list[dict[str, Any]]:
                watch.turn()
                return [event for event in events if event["event"] == name]

            found: list[dict[str, Any]] = until(turned, f"{name}; so far {events}", 40)
            return found[-1]

        try:
            assert machine.run(["systemctl", "daemon-reload"]).code == 0
            started = machine.run(["systemctl", "start", "small.service"])
            assert started.code == 0, started.err
            verdict = turn_until("verdict")
            assert verdict["verdict"] == "hang_symmetric_spin", verdict
            folder = Path(verdict["bundle"])
            assert bundle.verify(folder).ok
            assert {"rank-0.box", "pyspy-0.json", "journal.jsonl", "ps.txt"} <= {path.name for path in folder.iterdir()}
            first = json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])
            invocation = machine.run(["systemctl", "show", "-p", "InvocationID", "--value", "small.service"]).out.decode().strip()
            assert first.get("_SYSTEMD_INVOCATION_ID") == invocation or first.get("INVOCATION_ID") == invocation
            assert machine.run(["systemctl", "kill", "-s", "KILL", "small.service"]).code == 0
            turn_until("ended")
            turn_until("restarted")
            assert not [event for event in events if event["event"] == "crash_declared"], "its death belongs to the wedge"
            # One that rests, and that somebody restarts: the journal and the unit say that it was told to stop.
            rests = UNIT.replace("symmetric 40", "idle")
            assert machine.run(["sh", "-c", "cat > /etc/systemd/system/small.service"], stdin=rests.encode()).code == 0
            assert machine.run(["systemctl", "daemon-reload"]).code == machine.run(["systemctl", "restart", "small.service"]).code == 0
            until(lambda: watch.turn().state is State.idle, f"it rests; {events}", 40)
            assert machine.run(["systemctl", "restart", "small.service"]).code == 0
            # The next look finds it up again: none fell into its absence.
            until(lambda: machine.run(["test", "-e", "/run/small/rank-0.box"]).code == 0, "it is back")
            assert "told to stop" in turn_until("planned_end")["text"]
            assert not [event for event in events if event["event"] == "crash_declared"], events
        finally:
            watch.close()
