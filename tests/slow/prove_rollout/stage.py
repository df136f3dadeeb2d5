"""Two nodes, an operator and a client that never stops asking: where a row is played, and what is read at its end."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.e2e import nodes
from tests.e2e.rollout_fleet import UNIT, Fleet
from tests.opsctl.site import wait_until
from tests.slow.prove_rollout import gaps
from tests.slow.prove_rollout.row import Row, reason

PULSE = Path(__file__).with_name("pulse.py")
POISON = "/var/tmp/lb-poison"
ARGS = ("--crash-sequential", "--dies-of", POISON)
Code = int | None


class Stage:
    """``acts`` write what they did with ``ran``; ``end`` reads the nodes and makes the row."""

    def __init__(self, folder: Path) -> None:
        self.fleet = Fleet(folder, args=ARGS, prefix="lbprove")
        self.fleet_text = (folder / "fleet.toml").read_text()
        self.beats = folder / "beats"
        self.beats.touch()
        argv = [*self.fleet.here, sys.executable, PULSE, "http://10.77.0.11:30000", self.beats]
        self._pulse = subprocess.Popen(argv)
        self.answer: dict[str, Any] = {}
        self.told = ""
        self.codes: list[Code] = []
        self.pages: list[str] = []
        self.since = 0.0
        self.boot_s = 0.0

    def close(self) -> None:
        self._pulse.kill()
        self._pulse.wait()
        self.fleet.close()

    @property
    def nodes(self) -> list[nodes.SystemdNode]:
        return self.fleet.nodes

    def shell(self, node: int, script: str) -> str:
        done = self.nodes[node].run(["sh", "-c", script], deadline_s=60)
        return done.out.decode(errors="replace")

    # Between rows.

    def reset(self) -> None:
        """As it was at first: no override, no lease, no journal, both units fresh and the client served."""
        shutil.rmtree(self.fleet.folder / "state", ignore_errors=True)
        (self.fleet.folder / "fleet.toml").write_text(self.fleet_text)
        units = "/systemd/system"
        for at in (0, 1):
            self.shell(at, f"""umount -l /etc{units}/{UNIT}.d 2>/dev/null
                systemctl stop 'opsctl-deadman-*' squat.service 2>/dev/null
                rm -rf {POISON} /run/opsctl /var/lib/opsctl /run{units}/{UNIT}.d /etc{units}/{UNIT}.d
                systemctl daemon-reload
                systemctl stop {UNIT}""")  # fmt: skip
        begun = time.monotonic()
        for at in (0, 1):
            self.shell(at, f"systemctl reset-failed {UNIT} 2>/dev/null; systemctl --no-block start {UNIT}")
        wait_until(lambda: self.served_since(begun), 30, "the client to be served")
        self.boot_s = round(max(at for at, _ in self._beats(begun)) - begun, 2) if not self.boot_s else self.boot_s
        self.codes, self.pages, self.answer, self.told = [], [], {}, ""
        self.fleet.pages_file.write_text("")
        self.since = time.monotonic()

    def _beats(self, since: float) -> list[tuple[float, bool]]:
        return gaps.beats(self.beats.read_text(), since)

    def served_since(self, at: float) -> bool:
        return any(good for _, good in self._beats(at))

    # Acts.

    def ran(self, *words: str) -> int:
        code, self.answer, self.told = self.fleet.rollout(*words)
        self.codes.append(code)
        return code

    def apply(self, *words: str) -> int:
        return self.ran("apply", "--yes", "--boot-deadline-s", "8", *words)

    @contextlib.contextmanager
    def spawned(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        process = self.fleet.spawn("apply", "--yes", "--boot-deadline-s", "8", *words)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            self.told = process.communicate(timeout=20)[1]

    def when(self, mark: str, process: subprocess.Popen[str], deadline_s: float = 60.0) -> bool:
        """Wait until the journal of the rollout holds these words; False when it ended before."""
        wait_until(lambda: self._journal_says(mark) or process.poll() is not None, deadline_s, f"the journal to say {mark}")
        return self._journal_says(mark)

    def _journal_says(self, mark: str) -> bool:
        found = self.fleet.journals()
        return bool(found) and mark.encode() in found[-1].read_bytes()

    def settled(self, deadline_s: float = 60.0) -> None:
        """No lease and no trial on any node."""

        script = f"ls /run/opsctl/{UNIT}/lease /run/systemd/system/{UNIT}.d/* 2>/dev/null; systemctl is-active 'opsctl-deadman-*'"

        def quiet() -> bool:
            told = [line for at in (0, 1) for line in self.shell(at, script).splitlines()]
            return not any(line == "active" or line.endswith("/lease") or "trial" in line for line in told)

        wait_until(quiet, deadline_s, "every dead-man to be done")

    # The end.

    def end(self, name: str, flag: str, *, wanted: Sequence[tuple[str, ...]], codes: Sequence[tuple[Code, ...]], page: bool,
            serves: bool = True, notes: str = "") -> Row:  # fmt: skip
        """``flag``: the word that tells the new configuration from the old."""
        if serves:
            begun = time.monotonic()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: self.served_since(begun), 20, "the client to be served")
        found = tuple(self._side(node, flag) for node in self.nodes)
        pages = tuple(json.loads(line)["title"] for line in self.fleet.pages_file.read_text().splitlines())
        now = time.monotonic()
        beats = self._beats(self.since)
        last_good = any(good for at, good in beats if at > now - 3)
        return Row(name, "contract", found, tuple(wanted), tuple(self.codes), tuple(codes), pages, page, last_good,
                   gaps.without_service(beats), self.boot_s, notes or reason(self.answer))  # fmt: skip

    def _side(self, node: nodes.SystemdNode, flag: str) -> str:
        active = node.run(["systemctl", "is-active", UNIT]).out.decode().strip() == "active"
        argv = self.fleet.argv(node) if active else []
        trial = node.run(["sh", "-c", f"ls /run/systemd/system/{UNIT}.d 2>/dev/null"]).out
        if not argv:
            return "down"
        return ("new" if flag in argv else "old") + (" (trial)" if trial else "")


def later(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread
