"""The rows that need the engine: three ranks with a small random model as units on two nodes, broken by named faults."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.e2e.twonodes import UNIT, URL, Group
from tests.opsctl.site import wait_until
from tests.slow.prove_rollout import gaps
from tests.slow.prove_rollout.row import Row, reason

PULSE = Path(__file__).with_name("pulse.py")
CALLER = """[[deployment.tiny.caller]]
name = "triage"
request = { messages = [{ role = "user", content = "which colour?" }], max_tokens = 16, response_format = { type = "json_object" } }
expect = "json"
"""
BOOT_S = "90"
OLD = ("old", "old")


class Engine:
    """The group, a client that never stops asking it, and what a row did."""

    def __init__(self, folder: Path, undo: contextlib.ExitStack) -> None:
        self.group = Group(folder, undo)
        self.group.start()
        self.beats = folder / "beats"
        self.beats.touch()
        # Often, and little of what the server can do: a measurement beside much traffic is none.
        pulse = subprocess.Popen([*self.group._here, sys.executable, PULSE, URL, self.beats, "0.2"])
        undo.callback(pulse.wait, 10)
        undo.callback(pulse.kill)
        self.plain = self.group.fleet.read_text()
        self.boot_s = 0.0
        self.reset()
        code, answer, err = self.group.opsctl("rollout", "verify", deadline_s=200)
        assert code == 0, (answer, err)

    def reset(self) -> None:
        self.group.fleet.write_text(self.plain)
        self.group.pages_file.write_text("")
        self.codes: list[int | None] = []
        self.told, self.answer = "", dict[str, Any]()
        self.since = time.monotonic()

    def apply(self, *words: str) -> int:
        base = ("rollout", "apply", "--yes", "--stable-s", "5", "--boot-deadline-s", BOOT_S)
        code, self.answer, self.told = self.group.opsctl(*base, *words, deadline_s=900)
        self.codes.append(code)
        return code

    def end(self, name: str, flag: str, wanted: tuple[str, ...], codes: tuple[int, ...], *, page: bool) -> Row:
        found = []
        for node in self.group.nodes:
            pid = node.run(["systemctl", "show", "-P", "MainPID", UNIT]).out.decode().strip()
            argv = node.run(["cat", f"/proc/{pid}/cmdline"]).out.decode().split("\0") if pid != "0" else []
            found.append("down" if not argv else "new" if any(flag in word for word in argv) else "old")
        begun = time.monotonic()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: any(good for at, good in self._beats(begun)), 30, "the client to be served")
        beats = self._beats(self.since)
        serves = any(good for at, good in beats if at >= begun)
        return Row(name, "engine", tuple(found), (wanted,), tuple(self.codes), (codes,), tuple(self.group.pages()), page, serves,
                   gaps.without_service(beats), self.boot_s, reason(self.answer))  # fmt: skip

    def _beats(self, since: float) -> list[tuple[float, bool]]:
        return gaps.beats(self.beats.read_text(), since)

    def note_boot(self) -> None:
        found = json.loads((self.group.folder / "state/lastbatch/rollouts/tiny/boots.json").read_text())["boots"]
        self.boot_s = round(max(boot["seconds"] for boot in found), 1)


Play = Callable[[Engine, str], Row]


def bad(fault: str, *words: str) -> Play:
    def play(stage: Engine, name: str) -> Row:
        stage.apply("--set", f"fault={fault}", *words)
        return stage.end(name, fault, OLD, (3,), page=True)

    return play


def good(stage: Engine, name: str) -> Row:
    stage.apply("--set", "max-queued-requests=99")
    row = stage.end(name, "--max-queued-requests", ("new", "new"), (0,), page=False)
    stage.apply("--unset", "max-queued-requests")
    return row


def unknown_flag(stage: Engine, name: str) -> Row:
    stage.apply("--set", "max-queued-request=99")
    return stage.end(name, "--max-queued-request", OLD, (2,), page=False)


def old_traceback(stage: Engine, name: str) -> Row:
    stage.apply("--set", "fault=decode.crash:after_ready=true")
    stage.apply("--set", "max-queued-requests=98")
    row = stage.end(name, "--max-queued-requests", ("new", "new"), (3, 0), page=False)
    stage.apply("--unset", "max-queued-requests")
    return row


def caller_regression(stage: Engine, name: str) -> Row:
    """The plan foresees it from the dialect's own rule, so that nothing is restarted to learn it."""
    stage.group.fleet.write_text(stage.plain.replace("[page]", CALLER + "[page]"))
    stage.apply("--set", "grammar-backend=none")
    return stage.end(name, "--grammar-backend", OLD, (2,), page=False)


ROWS: Mapping[str, Play] = {
    "engine: good change": good,
    "engine: unknown flag": unknown_flag,
    "engine: crash on first decode": bad("decode.crash:after_ready=true"),
    "engine: crash after 100 requests": bad("crash.after:requests=100", "--stable-s", "60"),
    "engine: boot hang": bad("boot.hang", "--boot-deadline-s", "25"),
    "engine: healthy but garbage answers": bad("answers.garbage"),
    "engine: healthy but no progress": bad("progress.none", "--boot-deadline-s", "40"),
    "engine: flag live on one rank only": bad("config.split:rank=1"),
    "engine: old traceback before the restart": old_traceback,
    "engine: caller regression": caller_regression,
    "engine: throughput loss": bad("decode.slow:factor=4", "--throughput-allowance", "50"),
}
