"""The processes that the launcher starts: one API process (on node 0) and the ranks of this node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine import keys
from engine.config import Settings

_STOPPED_S = 3.0


@dataclass
class Child:
    """A process with two pipes: it reads ``control``, and says on ``ready`` that it serves. To a rank the closing of
    ``control`` means stop; the API process reads on it why it must end at once (``engine.server.control``)."""

    name: str
    process: subprocess.Popen[bytes]
    control: int
    ready: int
    said: bytes = b""
    rank: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        if not self.said.endswith(b"\n"):
            with contextlib.suppress(BlockingIOError):
                self.said += os.read(self.ready, 4096)
        return self.said.endswith(b"\n")

    @property
    def is_stopped(self) -> bool:
        """Whether it is in state T: it was sent SIGSTOP, and nothing else reaches it."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):
            return False

    def stop(self) -> None:
        """Ask for an ordered end: ranks hear it on the pipe, the API process by signal."""
        if self.rank is None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
        elif self.control >= 0:
            os.close(self.control)
            self.control = -1

    def tell(self, line: str) -> None:
        """Write a line on ``control``. A process that has ended hears nothing, which is no error."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.control, line.encode() + b"\n")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        for descriptor in (self.control, self.ready):
            if descriptor >= 0:
                os.close(descriptor)
        self.control = self.ready = -1


@dataclass
class Family:
    """All children of one launcher."""

    children: list[Child] = field(default_factory=list)

    def spawn(self, name: str, module: str, env: Mapping[str, str], rank: int | None = None, handed: int | None = None) -> Child:
        """``handed``: one more descriptor that the process inherits, closed here."""
        control_read, control_write = os.pipe2(os.O_CLOEXEC)
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        its = (control_read, ready_write) if handed is None else (control_read, ready_write, handed)
        fcntl.fcntl(ready_read, fcntl.F_SETFL, os.O_NONBLOCK)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module], stdin=subprocess.DEVNULL, pass_fds=its,
                env={**env, "LASTBATCH_CONTROL_FD": str(control_read), "LASTBATCH_READY_FD": str(ready_write)},
            )  # fmt: skip
        finally:
            for descriptor in its:
                os.close(descriptor)
        child = Child(name, process, control_write, ready_read, rank=rank)
        self.children.append(child)
        return child

    @property
    def ready(self) -> bool:
        """Every process that has something to say has said it: the API process and rank 0."""
        return all(child.is_ready for child in self.children if child.rank in (None, 0))

    def dead(self) -> Child | None:
        return next((child for child in self.children if child.process.poll() is not None), None)

    def wait(self, children: list[Child], deadline_s: float, hopeless: Callable[[], bool] = lambda: False) -> list[Child]:
        """Wait for some to end; returns those that did not. One that is stopped (state T) hears nothing, and after a moment
        is waited for no longer; nobody is once ``hopeless``."""
        until = time.monotonic() + deadline_s
        stopped: dict[int, float] = {}
        while (left := [child for child in children if child.process.poll() is None]) and (now := time.monotonic()) < until:
            stopped = {child.pid: stopped.get(child.pid, now) for child in left if child.is_stopped}
            if (len(stopped) == len(left) and max(stopped.values()) < now - _STOPPED_S) or hopeless():
                break
            time.sleep(0.02)
        return left

    def kill_all(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.process.wait()
            child.close()


def rank_environment(settings: Settings, rank: int, base: Mapping[str, str], threads: int) -> dict[str, str]:
    """A rank's environment: threads must be set before the process starts, or the stream thread's team ignores it."""
    count = str(threads)
    return {**base, "LASTBATCH_SETTINGS": settings.to_json(), "LASTBATCH_RANK": str(rank), "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip


def base_environment(
    settings: Settings, model: Path, sockets: Path, run_dir: Path, invocation: str, env: Mapping[str, str]
) -> dict[str, str]:
    """What every child gets. The notification socket stays with the launcher, and so do keys."""
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", *keys.NAMES)
    kept = {key: value for key, value in env.items() if key not in own}
    return {**kept, "LASTBATCH_SETTINGS": settings.to_json(), "LASTBATCH_SOCKETS": str(sockets), "LASTBATCH_RUN_DIR": str(run_dir),
            "LASTBATCH_MODEL_FOLDER": str(model), "INVOCATION_ID": invocation, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}  # fmt: skip
