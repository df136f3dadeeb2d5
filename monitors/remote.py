"""Run a command on a node: here, or through the system's OpenSSH with a master connection that is kept open.

Every command has a deadline. Output goes through temporary files, never pipes: a master connection that ssh leaves
behind keeps the pipes of the command that started it open, and a reader of such a pipe would wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from monitors import fleet

COLLECTOR = Path(__file__).parent / "observe" / "onnode.py"


class Asked(Protocol):
    """Whoever a node's collector can be asked through: a ``Remote``, or a collector that stays there."""

    name: str

    @property
    def local(self) -> bool: ...

    def collect(self, what: str, deadline_s: float, **arguments: Any) -> Any: ...


class NodeError(RuntimeError):
    """A node did not do what was asked: the text names the node, the command and why. ``kind`` is ``unreachable``,
    ``deadline`` or ``failed``."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


@dataclass(frozen=True)
class Done:
    """A command that ended. ``seconds`` is its wall time."""

    code: int
    out: bytes
    err: str
    seconds: float


class Remote:
    """One node. Use as a context manager, or call ``close``: it ends the master connection."""

    def __init__(self, node: fleet.Node, control_dir: Path | None = None) -> None:
        self.name = node.name
        self._destination = shlex.split(node.ssh)
        self._own_dir = control_dir is None and bool(self._destination)
        # A socket path may have 107 bytes; ssh's %C takes 40 of them, so the folder must be a short one.
        self._control = Path(tempfile.mkdtemp(prefix="hm-")) if self._own_dir else control_dir
        self.python = node.python or (sys.executable if self.local else "python3")
        self.py_spy = node.py_spy

    @property
    def local(self) -> bool:
        return not self._destination

    def argv(self, command: Sequence[str], *, connect_s: float = 5.0) -> list[str]:
        """What to execute on this machine to run ``command`` on the node."""
        if self.local:
            return list(command)
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(connect_s))),
            "ControlMaster": "auto",
            "ControlPath": f"{self._control}/%C",
            "ControlPersist": "600",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "2",
        }
        flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return ["ssh", *flags, *self._destination, "--", shlex.join(command)]

    def run(self, command: Sequence[str], *, deadline_s: float, stdin: bytes = b"") -> Done:
        """Run to the end. Raises NodeError when the node is not reached or the deadline passes; any other exit
        status is the caller's to judge."""
        started = time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            argv = self.argv(command, connect_s=min(5.0, deadline_s))
            try:
                process = subprocess.Popen(argv, stdin=given, stdout=out, stderr=err, start_new_session=True)
            except OSError as error:
                raise NodeError("failed", f"node {self.name}: {argv[0]}: {error.strerror}") from error
            try:
                code = process.wait(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                raise NodeError("deadline", f"node {self.name}: {_short(command)}: not done after {deadline_s:.1f} s") from None
            finally:
                _end(process)
            out.seek(0)
            err.seek(0)
            text = err.read().decode(errors="replace").strip()
            if code == 255 and not self.local:
                raise NodeError("unreachable", f"node {self.name}: ssh: {text or 'exit status 255'}")
            return Done(code, out.read(), text, time.monotonic() - started)

    def collect(self, what: str, deadline_s: float, *, collector: Path = COLLECTOR, **arguments: Any) -> Any:
        """Run one function of a collector (``observe/onnode.py``) on the node, in a process of its own: reading
        /proc of a process in trouble can block, and then only that process is lost.

        Raises:
            NodeError: not reached, not done in time, or the collector failed.
        """
        request = json.dumps({"what": what, "deadline_s": deadline_s, **arguments})
        # The collector's text goes through standard input, so that a node needs nothing but a Python.
        done = self.run([self.python, "-", request], deadline_s=deadline_s + 1.0, stdin=collector.read_bytes())
        if done.code != 0:
            raise NodeError("failed", f"node {self.name}: collecting {what}: {_last_line(done.err) or f'exit status {done.code}'}")
        try:
            return json.loads(done.out)
        except ValueError as error:
            raise NodeError("failed", f"node {self.name}: collecting {what}: answer is not JSON ({error})") from error

    def close(self) -> None:
        if self.local or not self._own_dir or self._control is None:
            return
        stop = ["ssh", "-o", f"ControlPath={self._control}/%C", "-O", "exit", *self._destination]
        # No master (never connected, already gone) is as good as one that ended.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(stop, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False)
        shutil.rmtree(self._control, ignore_errors=True)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _short(command: Sequence[str]) -> str:
    text = shlex.join(command)
    return text if len(text) <= 80 else text[:77] + "..."


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else ""
