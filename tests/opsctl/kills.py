"""A rollout that is cut to pieces: opsctl is killed at drawn moments, started again, killed again. However that goes,
every service ends on one side, all new and committed or all old, and the group answers."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from opsctl.rollout import journal
from tests.opsctl.site import wait_until

MARKS = ['"state":"planned"', '"state":"armed"', '"state":"applied"', '"state":"restarted"', '"state":"proving"', '"state":"soaking"',
         '"event":"prepare"', '"event":"commit"', '"state":"committed"', '"state":"reverting"', '"state":"reverted"']  # fmt: skip
ENDS = ("resume", "abort", "resume and kill", "abort and kill", "nothing")


class Played(Protocol):
    """A deployment that is rolled out to: ``tests.opsctl.site.Site``, or one of the engine."""

    @property
    def services(self) -> Sequence[Any]: ...
    @property
    def running(self) -> list[list[str]]: ...
    def spawn(self, *words: str) -> subprocess.Popen[str]: ...
    def answers(self) -> bool: ...
    @property
    def journals(self) -> Path: ...


def side(site: Played, new: Sequence[str], old: Sequence[str] = ()) -> str:
    """``new`` or ``old`` when every service runs the same and nothing is pending; else what is there. ``new`` and ``old``:
    the last arguments of each."""
    changes = [service.read_change() for service in site.services]
    if any(change.trial for change in changes) or any(service.lease_token() for service in site.services):
        return f"undecided: {changes}"
    running = site.running
    if all(running) and all(args[-len(new) :] == list(new) for args in running):
        return "new"
    if all(running) and not any(args[-len(new) :] == list(new) for args in running):
        return "old"
    return f"split: {running} {changes}"


class Kills:
    """``leases_s``: after which the dead-men act, one is drawn. ``longest_s``: of a drawn moment. ``deadline_s``: for the end."""

    def __init__(self, site: Played, seed: int, *, leases_s: Sequence[float] = (0.8, 4.0), longest_s: float = 6.0, deadline_s: float = 30.0,
                 boot_s: float = 8.0, stable_s: float = 0.2) -> None:  # fmt: skip
        self.site, self.seed, self.chance = site, seed, random.Random(seed)
        self._longest_s, self._deadline_s = longest_s, deadline_s
        self._leases_s = leases_s
        self._words = ["--yes", "--incident", "--stable-s", str(stable_s), "--boot-deadline-s", str(boot_s)]
        self.value = 32
        self.told = ""

    def run(self) -> str:
        """One rollout and its end: ``new`` or ``old``. Raises AssertionError with the seed and what was done."""
        flag = ["--page-size", str(self.value)]
        self.told = f"seed {self.seed}, {' '.join(flag)}: apply"
        lease_s = self.chance.choice(self._leases_s)
        self._start_and_kill("apply", *self._words, "--lease-s", str(lease_s), "--set", f"page-size={self.value}")
        for _ in range(self.chance.randint(0, 2)):
            then = self.chance.choice(ENDS)
            self.told += f", {then}"
            if then.endswith("and kill"):
                self._start_and_kill(then.split()[0])
            elif then != "nothing":
                self._to_its_end(then)
        ended = ""

        def one_side() -> bool:
            nonlocal ended
            ended = side(self.site, flag)
            return ended in ("new", "old")

        try:
            wait_until(one_side, self._deadline_s)
        except AssertionError:
            raise AssertionError(f"after {self._deadline_s} s: {ended} ({self.told})") from None
        wait_until(self.site.answers, self._deadline_s, f"an answer ({self.told})")
        self._close()
        ended = side(self.site, flag)
        assert ended in ("new", "old"), f"{ended} ({self.told})"
        if ended == "new":
            self.value = {32: 64, 64: 32}[self.value]
        return ended

    def _start_and_kill(self, *words: str) -> None:
        """Kill it at a drawn mark of the journal, or at a drawn moment."""
        before = self._journal()
        process = self.site.spawn(*words)
        mark = self.chance.choice(MARKS) if self.chance.random() < 0.6 else ""
        pause = self.chance.uniform(0.0, 0.05 if mark else self._longest_s)
        self.told += f" killed {pause:.3f} s after {mark or 'it began to write'}"

        def reached() -> bool:
            return process.poll() is not None or (self._journal() != before and mark.encode() in self._journal()[len(before) :])

        wait_until(reached, 60, f"{mark} ({self.told})")
        time.sleep(pause)  # what is drawn
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)

    def _to_its_end(self, word: str) -> None:
        process = self.site.spawn(word)
        process.communicate(timeout=120)

    def _close(self) -> None:
        """Whatever is still open in the journal is closed: nothing may be left that cannot be."""
        if any(f'"state":"{end}"'.encode() in self._journal().splitlines()[-1] for end in ("committed", "reverted")):
            return
        for _ in range(3):
            process = self.site.spawn("abort", "--lock-wait", "5")
            _, err = process.communicate(timeout=120)
            if process.returncode in (2, 3, 0):
                return
        raise AssertionError(f"a rollout that was cut off cannot be closed ({self.told}): {err}")

    def _journal(self) -> bytes:
        found = journal.all_of(self.site.journals)
        return found[-1].read_bytes() if found else b""
