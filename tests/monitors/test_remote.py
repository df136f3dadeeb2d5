"""Commands on a node: here, and over a real ssh to a real sshd on loopback."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitors import engines, fleet
from monitors.capture import bundle
from monitors.observe import boxes, logfile
from monitors.observe.kin import Kin
from monitors.remote import NodeError, Remote
from monitors.standing import Standing
from tests.monitors.cluster import HEALTHY, Cluster, fleet_text, until, web
from tests.ports import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
needs_sshd = pytest.mark.skipif(not Path(SSHD).exists() or os.geteuid() != 0, reason="needs sshd and root")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """What the fleet file's key ``ssh`` holds for a node behind a real sshd."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    port = free_port()
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {"HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "authorized", "PidFile": "none", "StrictModes": "no",
               "ListenAddress": "127.0.0.1", "UsePAM": "no", "PermitRootLogin": "yes"}  # fmt: skip
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", "/dev/null", "-p", str(port), *words], stderr=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port), "sshd listens")
        trust = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        yield f"-F none -i {tmp_path / 'user'} -p {port} {trust} 127.0.0.1"
    finally:
        server.terminate()
        server.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_command_here_gives_its_output_and_status() -> None:
    with Remote(fleet.Node(name="a")) as here:
        done = here.run(["sh", "-c", "cat; echo no >&2; exit 3"], deadline_s=5, stdin=b"given")
    assert (done.code, done.out, done.err) == (3, b"given", "no")


def test_a_command_past_its_deadline_is_ended_with_its_children() -> None:
    with Remote(fleet.Node(name="a")) as here:
        started = time.monotonic()
        with pytest.raises(NodeError, match=r"node a: sh .*: not done after 0\.3 s") as caught:
            here.run(["sh", "-c", "sleep 61 & echo $! > /dev/null; sleep 61"], deadline_s=0.3)
    assert caught.value.kind == "deadline" and time.monotonic() - started < 5


@needs_sshd
def test_commands_over_ssh_share_one_kept_open_connection(ssh: str) -> None:
    with Remote(fleet.Node(name="b", ssh=ssh)) as there:
        first = there.run(["echo", "a b", "c"], deadline_s=10)
        assert first.out == b"a b c\n"
        check = subprocess.run(
            ["ssh", "-o", f"ControlPath={there._control}/%C", "-O", "check", *ssh.split()], capture_output=True, check=False
        )
        assert check.returncode == 0, check.stderr
        assert there.run(["cat"], deadline_s=10, stdin=b"\0bytes\xff").out == b"\0bytes\xff"
        folder = there._control
    assert folder is not None and not folder.exists()


@needs_sshd
def test_a_collector_that_stays_is_asked_again_and_again_and_started_anew_when_it_was_lost(ssh: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("one\n")
    with Cluster(tmp_path / "c", world=1) as cluster, Remote(fleet.Node(name="b", ssh=ssh, python=sys.executable)) as there:
        standing = Standing(there)
        try:
            follower = logfile.Follower(str(log), standing)
            assert follower.poll().value == ["one"]
            first = standing._process
            cluster.work()
            for _ in range(3):
                reading = boxes.copy(standing, str(cluster.run_dir), deadline_s=10, full=False)
                assert reading.value is not None and reading.value.boxes[0].snapshot.host.step > 0, reading.reason
            with log.open("a") as file:
                file.write("two\n")
            assert follower.poll().value == ["two"] and standing._process is first
            missing = boxes.copy(standing, "/nowhere", deadline_s=10, full=False).value
            assert missing is not None and "/nowhere" in missing.unreadable[0]
            with pytest.raises(NodeError, match="No such file"):
                standing.collect("follow", 5, path="/nowhere.log")
            assert first is not None
            first.kill()
            first.wait(10)
            assert follower.poll().reason.startswith("node b: collecting follow"), "a loss is a gap"
            with log.open("a") as file:
                file.write("three\n")
            assert follower.poll().value == ["three"] and standing._process is not first
        finally:
            standing.close()


CHILD = "import setproctitle, sys\nsetproctitle.setproctitle('sglang::scheduler_TP7')\nprint(1, flush=True)\nsys.stdin.read()"


@needs_sshd
def test_a_rank_that_died_under_its_living_parent_on_another_node_is_found(ssh: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    with Remote(fleet.Node(name="b", ssh=ssh)) as there, concurrent.futures.ThreadPoolExecutor(1) as pool:
        kin, now = Kin({"b": there}, engines.load("sglang"), pool), [0.0]

        def looked() -> list[tuple[str, int]]:
            now[0] += 11.0
            pool.submit(lambda: None).result(20)  # the table that was asked for before has come
            return [(row.node, row.pid) for row in kin.dead(now[0]) if row.pid == child.pid]

        try:
            assert looked() == looked() == looked() == []
            child.stdin.close()
            until(looked, "the dead rank is seen on node b")
            assert looked() == [("b", child.pid)]
        finally:
            child.stdout.close()
            child.wait(10)


@needs_sshd
def test_boxes_come_over_ssh_with_the_nodes_own_clock(ssh: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, world=2) as cluster, Remote(fleet.Node(name="b", ssh=ssh)) as there:
        cluster.work()
        reading = boxes.copy(there, str(cluster.run_dir), deadline_s=10)
        assert reading.value is not None, reading.reason
        assert [box.rank for box in reading.value.boxes] == [0, 1]
        for box in reading.value.boxes:
            assert box.state in ("R", "S", "D") and box.snapshot.events and len(box.data) > 300_000
            assert 0 <= (reading.value.clock.mono_ns - box.snapshot.host.mono_ns) / 1e9 < 5


def two_nodes(near: Cluster, far: Cluster, api: str, ssh: str) -> fleet.Deployment:
    text = fleet_text([("near", near.run_dir, near.log), ("far", far.run_dir, far.log)], api)
    return fleet.parse(text.replace('name = "far"', f'name = "far"\nssh = "{ssh}"\npython = "{sys.executable}"'), "fleet.toml").one()


@needs_sshd
def test_a_bundle_of_two_nodes_over_ssh_has_every_rank_and_names_the_odd_one(ssh: str, tmp_path: Path) -> None:
    with web(HEALTHY) as server, Cluster(tmp_path / "a", ranks=(0, 2)) as near, Cluster(tmp_path / "b", ranks=(1,)) as far:
        near.wedge("skip", far)
        taken = bundle.capture(two_nodes(near, far, server.url, ssh), root=tmp_path / "bundles", progress={"stalled_s": 9.0})
        assert taken.verdict.verdict == "hang_tp_desync", taken.verdict.to_json()
        assert all("rank 1" in who and "node far" in who for who in taken.verdict.suspects)
        assert bundle.verify(taken.folder).ok
        names = {path.name for path in taken.folder.iterdir()}
        assert {f"rank-{r}.box" for r in range(3)} | {f"pyspy-{r}.json" for r in range(3)} | {
            f"pyspy-{r}.t3.json" for r in range(3)
        } <= names
        assert {"server.log", "server.far-small-far.log"} <= names
        clocks = json.loads((taken.folder / "clocks.json").read_text())
        assert {node["node"] for node in clocks.values()} == {"near", "far"}


def test_a_node_that_hangs_keeps_no_other_waiting_and_what_it_owes_is_named(tmp_path: Path) -> None:
    silent = "-F none -o StrictHostKeyChecking=no -o ProxyCommand='sleep 60' far"
    with web(HEALTHY) as server, Cluster(tmp_path / "a", ranks=(0, 2)) as near, Cluster(tmp_path / "b", ranks=(1,)) as far:
        near.wedge("symmetric", far)
        taken = bundle.capture(two_nodes(near, far, server.url, silent), root=tmp_path / "bundles", progress={"stalled_s": 9.0})
        assert bundle.verify(taken.folder).ok
        given_up = min(item.end for item in taken.gaps if item.node == "far" and item.probe == "black_box")
        stacks = [item.end for item in taken.items if item.probe == "stacks" and item.node == "near" and item.outcome == "taken"]
        assert len(stacks) >= 4 and sorted(stacks)[1] < given_up, f"the first stacks of the near node waited: {stacks}, {given_up}"
        assert {"black_box", "log", "process", "stacks"} <= {gap.probe for gap in taken.gaps if gap.node == "far"}
        assert taken.verdict.verdict == "hang_symmetric_spin"
        assert any("node far" in gap.what for gap in taken.verdict.missing)


def test_a_node_that_cannot_be_reached_says_so_with_its_name() -> None:
    with (
        Remote(fleet.Node(name="b", ssh="-F none -o StrictHostKeyChecking=no -p 9 127.0.0.1")) as there,
        pytest.raises(NodeError) as caught,
    ):
        there.run(["true"], deadline_s=5)
    assert caught.value.kind == "unreachable" and "node b: ssh: " in str(caught.value)
