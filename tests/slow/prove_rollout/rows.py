"""The rows: each plays one thing that can go wrong, for real, and says which ends are right."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from tests.e2e.rollout_fleet import UNIT
from tests.opsctl.site import wait_until
from tests.slow.prove_rollout.row import Row
from tests.slow.prove_rollout.stage import POISON, Stage

OLD, NEW, DOWN = ("old", "old"), ("new", "new"), ("down", "down")
GOOD = ("--set", "max-queued-requests=99")
FLAG = "--max-queued-requests"
CALLER = """[[deployment.d.caller]]
name = "triage"
request = { messages = [{ role = "user", content = "which colour?" }], response_format = { type = "json_object" } }
expect = "json"
"""
SQUAT = (
    "import socket, time\nwhile True:\n    try:\n        held = socket.create_server(('0.0.0.0', 30000))\n        break\n"
    "    except OSError:\n        time.sleep(0.001)\ntime.sleep(600)"
)


def bad(flag: str, *words: str, serves_meanwhile: str = "") -> Callable[[Stage, str], Row]:
    """A change that must be reverted on both nodes, and paged."""

    def play(stage: Stage, name: str) -> Row:
        stage.apply(*words)
        return stage.end(name, flag, wanted=[OLD], codes=[(3,)], page=True, notes=serves_meanwhile)

    return play


def good_change(stage: Stage, name: str) -> Row:
    stage.apply(*GOOD)
    return stage.end(name, FLAG, wanted=[NEW], codes=[(0,)], page=False)


def unknown_flag(stage: Stage, name: str) -> Row:
    stage.apply("--set", "max-queued-request=99")
    return stage.end(name, "--max-queued-request", wanted=[OLD], codes=[(2,)], page=False)


def old_traceback(stage: Stage, name: str) -> Row:
    """A crash of before lies in the journal of the same unit."""
    stage.apply("--set", "disable-overlap-schedule")
    stage.apply(*GOOD)
    return stage.end(name, FLAG, wanted=[NEW], codes=[(3, 0)], page=False)


def caller_regression(stage: Stage, name: str) -> Row:
    path = stage.fleet.folder / "fleet.toml"
    path.write_text(stage.fleet_text.replace("[page]", CALLER + "[page]"))
    stage.apply("--set", "text-for=colour")
    return stage.end(name, "--text-for", wanted=[OLD], codes=[(3,)], page=True)


def orphan(stage: Stage, name: str) -> Row:
    """Somebody binds the port in the moment in which the service has stopped: neither side can start."""
    stage.nodes[0].run(["systemd-run", "--unit=squat.service", "--quiet", sys.executable, "-c", SQUAT])
    stage.apply(*GOOD)
    named = "the orphan is named" if "still held by process" in stage.told else "THE ORPHAN IS NOT NAMED"
    stuck = stage.end(name, FLAG, wanted=[("down", "old"), DOWN], codes=[(4,)], page=True, serves=False, notes=named)
    stage.shell(0, "systemctl stop squat.service")
    return stuck


def suppressing(stage: Stage, name: str) -> Row:
    """journald drops most lines of the unit, so that the log proves nothing."""
    for at in (0, 1):
        stage.shell(at, "printf '[Journal]\\nRateLimitIntervalSec=5s\\nRateLimitBurst=30\\n' >/etc/systemd/journald.conf.d/tight.conf; "
                        "systemctl restart systemd-journald")  # fmt: skip
    stage.apply(*GOOD, "--incident", "--no-revert-target")
    code = stage.codes[-1]
    for at in (0, 1):
        stage.shell(at, "rm /etc/systemd/journald.conf.d/tight.conf; systemctl restart systemd-journald")
    return stage.end(name, FLAG, wanted=[OLD], codes=[(3,), (4,)], page=True,
                     notes="" if code == 3 else "the revert cannot be proven either while lines are dropped")  # fmt: skip


def cut_at(mark: str) -> Callable[[Stage, str], Row]:
    """Node 2 is out of reach from this step on, until everything has come to its end."""

    def play(stage: Stage, name: str) -> Row:
        with stage.spawned(*GOOD, "--stable-s", "4", "--lease-s", "6") as process:
            stage.when(mark, process)
            stage.fleet.cut(1)
            try:
                stage.codes.append(process.wait(timeout=150))
            finally:
                stage.fleet.mend(1)
        stage.settled()
        until = time.monotonic() + 60
        while stage.codes[0] != 0 and stage.ran("abort") == 7 and time.monotonic() < until:
            stage.codes.pop()  # ssh's kept-open connection has not noticed yet that the link is back
        ends = [(4, 3), (3,), (3, 2), (0,)]
        return stage.end(name, FLAG, wanted=[OLD, NEW], codes=ends, page=stage.codes[0] != 0)

    return play


def cut_before(stage: Stage, name: str) -> Row:
    stage.fleet.cut(1)
    try:
        stage.apply(*GOOD)
    finally:
        stage.fleet.mend(1)
    return stage.end(name, FLAG, wanted=[OLD], codes=[(7,)], page=False)


def killed_at(mark: str, *, page: bool) -> Callable[[Stage, str], Row]:
    """SIGKILL to opsctl, and nobody comes."""

    def play(stage: Stage, name: str) -> Row:
        with stage.spawned(*GOOD, "--stable-s", "1", "--lease-s", "4") as process:
            reached = stage.when(mark, process)
            process.send_signal(signal.SIGKILL)
            process.wait()
        stage.codes.append(None)
        stage.settled()
        time.sleep(2.5)  # a dead-man looks at the unit for two seconds before it pages
        return stage.end(name, FLAG, wanted=[OLD, NEW], codes=[(None,)], page=page and reached)

    return play


def killed_and_resumed(stage: Stage, name: str) -> Row:
    with stage.spawned(*GOOD, "--stable-s", "2", "--lease-s", "30") as process:
        stage.when('"state":"soaking"', process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    stage.codes.append(None)
    stage.ran("resume")
    return stage.end(name, FLAG, wanted=[NEW], codes=[(None, 0)], page=False)


def disk_full(stage: Stage, name: str) -> Row:
    """The folder of the committed drop-in has no room on node 2."""
    folder = f"/etc/systemd/system/{UNIT}.d"
    stage.shell(1, f"mkdir -p {folder}; mount -t tmpfs -o size=8k,nr_inodes=8 tmpfs {folder}; cat /dev/zero >{folder}/fill 2>/dev/null")
    stage.apply(*GOOD)
    return stage.end(name, FLAG, wanted=[OLD], codes=[(3,)], page=True)


def operator_disk_full(stage: Stage, name: str) -> Row:
    """The operator's journal cannot be written any more in the middle of it."""
    state = stage.fleet.folder / "state"
    state.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", state], check=True)
    try:
        with stage.spawned(*GOOD, "--stable-s", "4") as process:
            stage.when('"state":"restarted"', process)
            with (state / "fill").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x" * 4096)
                except OSError:
                    pass
            stage.codes.append(process.wait(timeout=90))
    finally:
        subprocess.run(["umount", "-l", state], check=True)
    return stage.end(name, FLAG, wanted=[OLD, NEW], codes=[(3,), (0,)], page=True)


def two_at_once(stage: Stage, name: str) -> Row:
    """The same operator and one on another machine come in while one is at it."""
    with stage.spawned(*GOOD, "--stable-s", "60") as process:
        stage.when('"state":"soaking"', process)
        stage.ran("apply", "--yes", "--set", "page-size=32")
        home, stage.fleet.state = stage.fleet.state, "elsewhere"
        stage.ran("apply", "--yes", "--set", "page-size=32")
        stage.fleet.state = home
        stage.codes.append(process.wait(timeout=150))
    return stage.end(name, FLAG, wanted=[NEW], codes=[(6, 6, 0)], page=False)


def revert_fails(stage: Stage, name: str) -> Row:
    """The change leaves something behind that the old configuration dies of."""
    stage.apply("--set", f"poison={POISON}")
    return stage.end(name, "--poison", wanted=[DOWN, OLD], codes=[(4,)], page=True, serves=False)


def stuck_then_aborted(stage: Stage, name: str) -> Row:
    stage.apply("--set", f"poison={POISON}")
    for at in (0, 1):
        stage.shell(at, f"rm -f {POISON}")
    stage.ran("abort")
    return stage.end(name, "--poison", wanted=[OLD], codes=[(4, 3)], page=True)


def operator_powered_off(stage: Stage, name: str) -> Row:
    """opsctl runs on a node of its own, whose power goes."""
    with stage.fleet.operator_node() as node:
        process = stage.fleet.spawn_on(node, "apply", "--yes", *GOOD, "--stable-s", "60", "--lease-s", "5", "--boot-deadline-s", "8")
        try:
            wait_until(lambda: stage.fleet.all_run(FLAG) or process.poll() is not None, 60, "the change to run")
            time.sleep(2)
        finally:
            node.power_off()
            process.communicate(timeout=20)
    stage.codes.append(None)
    stage.settled()
    time.sleep(2.5)
    return stage.end(name, FLAG, wanted=[OLD], codes=[(None,)], page=True)


ARMED = ("applied", "restarted", "proving", "soaking")  # a dead-man runs everywhere, so it must page
STEPS = ("armed", "applied", "restarted", "proving", "soaking")
ROWS: Mapping[str, Callable[[Stage, str], Row]] = {
    "good change": good_change,
    "unknown flag": unknown_flag,
    "crash on first decode": bad("--disable-overlap-schedule", "--set", "disable-overlap-schedule"),
    "crash after 100 requests": bad("--crash-after", "--set", "crash-after=100", "--stable-s", "40"),
    "boot hang": bad("--never-ready", "--set", "never-ready", "--boot-deadline-s", "4"),
    "healthy but garbage answers": bad("--garbage", "--set", "garbage"),
    "healthy but no progress": bad("--deaf", "--set", "deaf", "--boot-deadline-s", "4"),
    "flag live on one rank only": bad("--split-rank", "--set", "split-rank=1"),
    "old traceback before the restart": old_traceback,
    "caller regression": caller_regression,
    "throughput loss": bad("--slow-s", "--set", "slow-s=0.1", "--throughput-allowance", "50"),
    "port still held by an orphan": orphan,
    "journald suppressing": suppressing,
    "node unreachable before the plan": cut_before,
    **{f"node unreachable at {step}": cut_at(f'"state":"{step}"') for step in STEPS},
    "node unreachable at the decision": cut_at('"event":"commit"'),
    **{f"opsctl SIGKILLed at {step}": killed_at(f'"state":"{step}"', page=step in ARMED) for step in ("planned", *STEPS)},
    "opsctl SIGKILLed at the decision": killed_at('"event":"commit"', page=False),
    "opsctl SIGKILLed, then resumed": killed_and_resumed,
    "the operator's node powered off": operator_powered_off,
    "disk full on the target": disk_full,
    "disk full at the operator": operator_disk_full,
    "two rollouts at once": two_at_once,
    "revert itself failing": revert_fails,
    "revert itself failing, then aborted": stuck_then_aborted,
}  # fmt: skip
