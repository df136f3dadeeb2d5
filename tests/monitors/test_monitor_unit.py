"""The packaged unit of the monitor on a real systemd node: hardened, notified, watched over; through restarts of the
server, of journald and of its own, a rotated journal and a full disk.

A node's kernel clock is the host's and cannot be stepped: steps of the wall clock are injected into the pure parts
(``test_progress.py``); every time-out of the monitor runs on the monotonic clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.nodes import SystemdNode, boot, missing
from tests.monitors.cluster import HERE, ROOT, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

FLEET = """[deployment.small]
engine = "lastbatch"
api = "http://127.0.0.1:9"
watchdog_s = 60
[[deployment.small.node]]
name = "n"
[[deployment.small.node.service]]
unit = "small.service"
ranks = [0]
[page]
urls = ["json://127.0.0.1:9000/"]
"""
SMALL = """[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart={python} {here}/smallrank/rank.py /run/small 0 1 "{mode}"
Environment=PYTHONPATH={here}:{root} PYTHONUNBUFFERED=1 SPT_NOENV=1
RuntimeDirectory=small
"""
SINK = """[Service]
ExecStart={python} {root}/tests/opsctl/page_sink.py 127.0.0.1 9000 /run/pages
"""
# The node may not read the kernel's log, which the unit asks for; and a test does not wait as long as a site does.
SITE = """[Service]
CapabilityBoundingSet=
CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_KILL
AmbientCapabilities=
AmbientCapabilities=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_KILL
RestartSec=200ms
WatchdogSec=5
TimeoutAbortSec=500ms
CPUQuota=
"""


class Node:
    """The node with the three units, and what its monitor has said."""

    def __init__(self, machine: SystemdNode) -> None:
        self.machine = machine
        units = machine.root / "etc/systemd/system"
        argv = [sys.executable, "-m", "monitors.cli", "unit", "--fleet", "/etc/lastbatch/fleet.toml"]
        printed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (machine.root / "etc/lastbatch").mkdir()
        (machine.root / "etc/lastbatch/fleet.toml").write_text(FLEET)
        (units / "hang-monitor.service").write_text(printed)
        (units / "hang-monitor.service.d").mkdir()
        (units / "hang-monitor.service.d/site.conf").write_text(SITE)
        (units / "sink.service").write_text(SINK.format(python=sys.executable, root=ROOT))
        self.ctl("start", "sink")

    def ctl(self, *words: str) -> str:
        done = self.machine.run(["systemctl", *words], deadline_s=60)
        assert done.code == 0, f"{words}: {done.err}; {self.machine.run(['journalctl', '-n', '30', '--no-pager']).out.decode()[-3000:]}"
        return done.out.decode().strip()

    def serve(self, mode: str) -> None:
        text = SMALL.format(python=sys.executable, here=HERE, root=ROOT, mode=mode)
        (self.machine.root / "etc/systemd/system/small.service").write_text(text)
        self.ctl("daemon-reload")
        self.ctl("restart", "small")

    def events(self, name: str, **wanted: object) -> list[dict[str, Any]]:
        out = self.machine.run(["journalctl", "-u", "hang-monitor", "-o", "cat", "--no-pager", "-a"]).out.decode(errors="replace")
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return [row for row in rows if row["event"] == name and all(row.get(key) == value for key, value in wanted.items())]

    def pages(self) -> list[str]:
        path = self.machine.root / "run/pages"
        return [json.loads(line)["title"] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def pid(self) -> str:
        return self.ctl("show", "-P", "MainPID", "hang-monitor")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    machine = boot("unit", tmp_path / "nodes")
    try:
        yield Node(machine)
    finally:
        machine.stop()


def test_the_packaged_unit_watches_through_restarts_rotation_its_own_death_and_a_full_disk(node: Node) -> None:
    machine = node.machine
    mount = "mkdir -p /var/lib/hang-monitor && mount -t tmpfs -o size=24m,mode=750 state /var/lib/hang-monitor"
    assert machine.run(["sh", "-c", mount]).code == 0
    node.serve("busy")
    node.ctl("start", "hang-monitor")  # returns with READY=1, which is the first look
    until(lambda: "small busy" in node.ctl("show", "-P", "StatusText", "hang-monitor"), "systemd is told what is watched")
    assert machine.run(["systemctl", "is-active", "hang-monitor"]).out.strip() == b"active"

    # A restart that somebody orders, and journald's own, raise nothing.
    node.ctl("restart", "systemd-journald")
    assert machine.run(["journalctl", "--rotate"]).code == 0
    node.serve("busy")
    until(lambda: "small busy" in node.ctl("show", "-P", "StatusText", "hang-monitor"), "the new start is watched")
    assert not node.pages() and not node.events("crash_declared")

    # A wedge is paged once, also when the monitor dies after it; who was paged hears of the end from the next one.
    node.serve("symmetric 40")
    until(node.pages, f"a page; so far {node.events('verdict')}")
    assert node.pages() == ["small: hang_symmetric_spin"]
    bundle = Path(node.events("verdict")[-1]["bundle"])
    assert str(bundle).startswith("/var/lib/hang-monitor/bundles/")
    inside = {path.name for path in (machine.root / str(bundle)[1:]).iterdir()}
    assert {"rank-0.box", "pyspy-0.json", "journal.jsonl"} <= inside, "what the hardening leaves is enough for a capture"
    before = node.pid
    node.ctl("kill", "-s", "KILL", "hang-monitor")
    until(lambda: node.pid not in ("0", before), "systemd starts it again")
    until(lambda: node.events("state", state="stalled")[1:], "the second monitor sees the same wedge")
    assert len(node.events("stall_declared")) == 1 and len(node.pages()) == 1
    node.serve("busy")
    until(lambda: node.pages()[1:] == ["over: small: hang_symmetric_spin"], f"the word that it is over; {node.pages()}")

    # The disk is full, with no older bundle to give room: the page goes out, what did not fit is named, the monitor lives.
    fill = "cd /var/lib/hang-monitor; rm -r bundles/*; dd if=/dev/zero of=fill bs=64k; truncate -s -450k fill"
    assert machine.run(["sh", "-c", fill]).code == 0
    pid = node.pid
    node.serve("symmetric 40")
    until(lambda: len(node.pages()) == 3, f"the page in spite of the disk; {node.pages()}, {node.events('error')}")
    said = json.dumps([*node.events("captured")[-1:], *node.events("error")])
    assert "No space left on device" in said, said
    assert node.pid == pid, "it was not started again"

    # Frozen, it is ended by systemd's watchdog and started again, and pages nothing twice.
    machine.run(["sh", "-c", "rm /var/lib/hang-monitor/fill"])
    node.ctl("kill", "-s", "STOP", "hang-monitor")
    until(lambda: node.pid not in ("0", pid), "the watchdog ends it")
    assert "watchdog" in machine.run(["journalctl", "--no-pager", "-u", "hang-monitor"]).out.decode().lower()
    until(lambda: node.events("state", state="stalled")[3:], "the third monitor sees the wedge")
    assert len(node.pages()) == 3
