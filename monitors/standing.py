"""A collector that stays on a node and is asked line by line: what an always-on monitor asks twice a second must not
start an interpreter twice a second. It ends with the connection, and is started again when it is asked next."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from typing import IO, Any, NoReturn

from monitors.remote import COLLECTOR, NodeError, Remote

START = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv[1])), 'collector', 'exec'))"
_CHUNK = 1 << 16


class Standing:
    """The functions of ``observe/onnode.py`` on one node, as ``Remote.collect`` gives them. For one thread at a time, and
    for what cannot block (black boxes, a log file): an answer that does not come ends the collector."""

    local = False

    def __init__(self, remote: Remote) -> None:
        self.name = remote.name
        self._remote = remote
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._heard = b""

    def collect(self, what: str, deadline_s: float, **arguments: Any) -> Any:
        """Raises NodeError as ``Remote.collect`` does."""
        until = time.monotonic() + deadline_s + 1.0
        process = self._process or self._begin(until)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"what": what, **arguments}).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._lose("failed", f"collecting {what}: its collector has ended")
        answer = json.loads(self._line(process, until, what))
        if "error" in answer:
            raise NodeError("failed", f"node {self.name}: collecting {what}: {answer['error']}")
        return answer["value"]

    def _begin(self, until: float) -> subprocess.Popen[bytes]:
        # The first command makes the master connection; one that makes it would keep our pipes open behind our back.
        self._remote.run(["true"], deadline_s=max(0.5, until - time.monotonic()))
        text = COLLECTOR.read_bytes()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the collector)
        argv = self._remote.argv([self._remote.python, "-u", "-c", START, str(len(text))])
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True)
        except OSError as error:
            self._said.close()
            raise NodeError("failed", f"node {self.name}: {argv[0]}: {error.strerror}") from error
        self._process, self._heard = process, b""
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the answer that does not come tells why
            process.stdin.write(text)
            process.stdin.flush()
        return process

    def _line(self, process: subprocess.Popen[bytes], until: float, what: str) -> bytes:
        assert process.stdout is not None
        parts = [self._heard]
        while b"\n" not in parts[-1]:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self._lose("deadline", f"collecting {what}: not done in time")
            data = os.read(process.stdout.fileno(), _CHUNK)
            if not data:
                kind = "unreachable" if process.wait() == 255 else "failed"
                self._lose(kind, f"collecting {what}: {self._why() or 'its collector has ended'}")
            parts.append(data)
        line, _, self._heard = b"".join(parts).partition(b"\n")
        return line

    def _why(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _lose(self, kind: str, text: str) -> NoReturn:
        self.close()
        raise NodeError(kind, f"node {self.name}: {text}")

    def close(self) -> None:
        """End it on the node: its input ends, and it with it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._said):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it was not told any more
                    stream.close()
