"""The run directory: held by one launcher, swept of what a killed one left, and given back empty if it can be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from engine.config import ConfigError

_SOCKETS = "lastbatch-"
_LINK = "sockets"
_EVIDENCE_KEPT = 8  # /run is memory, and a service manager may start a crashing server for days


class RunDirectory:
    """``path`` holds black boxes, launcher.json and evidence; ``sockets`` is a folder whose name is short. Where that lies
    elsewhere, a link in ``path`` says where, so that the next start finds what a killed one left.

    Raises (from the constructor):
        ConfigError: it cannot be made, or another server holds it.
        OSError: its disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = self._take()
        self._sweep()
        # A Unix socket's path has at most 107 bytes: a long run directory cannot hold one.
        within = len(str(path)) < 60
        self.sockets = Path(tempfile.mkdtemp(prefix=_SOCKETS, dir=path if within else None))
        if not within:
            (self.path / _LINK).symlink_to(self.sockets)

    def _take(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"--run-dir: {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise ConfigError(f"--run-dir: {self.path} is in use by a server (pid {holder}); stop it or give another --name") from None
        try:
            os.truncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(lock)
            raise OSError(error.errno, error.strerror, str(self.path / "lock")) from error  # a full disk may have room again
        return lock

    def _sweep(self) -> None:
        """What a server that was killed left. Its boxes stay as evidence until the next such end."""
        old = [path for pattern in ("rank-*.box", "remote-rank-*.box") for path in self.path.glob(pattern)]
        if old:
            previous = self.path / "previous"
            shutil.rmtree(previous, ignore_errors=True)
            previous.mkdir()
            for path in old:
                path.rename(previous / path.name)
        self._drop_link()
        for path in (*self.path.glob(f"{_SOCKETS}*"), *sorted(self.path.glob("evidence-*"))[:-_EVIDENCE_KEPT]):
            shutil.rmtree(path, ignore_errors=True)

    def _drop_link(self) -> None:
        link = self.path / _LINK
        if link.is_symlink():
            there = link.readlink()
            if there.name.startswith(_SOCKETS) and there.parent == Path(tempfile.gettempdir()):
                shutil.rmtree(there, ignore_errors=True)
            link.unlink()

    def close(self) -> None:
        shutil.rmtree(self.sockets, ignore_errors=True)
        self._drop_link()
        (self.path / "launcher.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / "lock").unlink()
        os.close(self._lock)
        with contextlib.suppress(OSError):
            self.path.rmdir()  # only when nothing is left in it
