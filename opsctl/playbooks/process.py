"""Running a command under a deadline: what it started ends with it, and what it says is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GRACE_S = 60.0  # for opsctl, which reverts on SIGTERM
SAY_EVERY_S = 8.0
_HEAR_S = 0.2
_KEPT_BYTES = 20_000


@dataclass(frozen=True)
class Ran:
    """``code`` None: it was ended at its deadline, or never began. ``said``: the end of what it wrote, errors last."""

    code: int | None
    said: str
    seconds: float
    why: str = ""

    @property
    def ending(self) -> str:
        return self.why or (f"exit code {self.code}" if (self.code or 0) >= 0 else f"signal {-(self.code or 0)}")


def end_in(argv: Sequence[str], deadline_s: float, *, env: Mapping[str, str] | None = None,
           talk: Callable[[str], None] = lambda text: None, grace_s: float = GRACE_S,
           heard: Callable[[str], None] | None = None) -> Ran:  # fmt: skip
    """Run it to its end, or end it: SIGTERM at the deadline, SIGKILL when the grace is over. ``talk`` hears every few
    seconds how long it has been; ``heard`` gets each line that it writes, as it comes, instead. An interrupt ends it the same
    way, then goes on."""
    begun = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        news = [_Lines(file.fileno(), heard) for file in (err, out)] if heard is not None else []

        def ran(code: int | None, why: str = "") -> Ran:
            for one in news:
                one.turn(last=True)
            texts = []
            for file in (out, err):
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _KEPT_BYTES))
                texts.append(file.read().decode(errors="replace").strip())
            return Ran(code, "\n".join(filter(None, texts)), time.monotonic() - begun, why)

        try:
            process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True)
        except OSError as error:
            return ran(None, f"{argv[0]}: {error.strerror}")
        try:
            said = begun
            while True:
                now = time.monotonic()
                left = begun + deadline_s - now
                if left <= 0:
                    _end(process, grace_s)
                    return ran(None, f"not done after {deadline_s:g} s, and ended")
                try:
                    return ran(process.wait(min(left, _HEAR_S if news else 1.0)))
                except subprocess.TimeoutExpired:
                    for one in news:
                        one.turn()
                    if not news and time.monotonic() - said >= SAY_EVERY_S:
                        said = time.monotonic()
                        talk(f"{said - begun:.0f} s so far; it is ended after {deadline_s:g} s")
        except BaseException:
            _end(process, grace_s)
            raise


@dataclass
class _Lines:
    """What a process has written to a file since the last turn. Its own place in the file is not moved."""

    fd: int
    heard: Callable[[str], None]
    at: int = 0
    part: bytes = b""

    def turn(self, *, last: bool = False) -> None:
        while piece := os.pread(self.fd, 65_536, self.at):
            self.at += len(piece)
            *lines, self.part = (self.part + piece).split(b"\n")
            for line in lines:
                self.heard(line.decode(errors="replace"))
        if last and self.part:
            self.heard(self.part.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """A second interrupt ends the grace: nothing that was started is left."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
