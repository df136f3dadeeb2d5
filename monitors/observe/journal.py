"""Follow a unit's journal: systemd-python where it is installed and the node is this machine, else ``journalctl``.

Both are scoped to a unit and give PID 1's lines about it as well. A record is handed on as the parser of recorded
journals takes it, so that live and replayed lines are read by the same code.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import threading
from typing import Any, Protocol

from monitors.observe.batchlog import Entry, journal_entry, record_entry
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

_FIRST_LINES = 200
_MOST_WAITING = 50_000


class Journal(Protocol):
    def poll(self) -> Reading[list[Entry]]: ...
    def close(self) -> None: ...


def follow(unit: str, remote: Remote) -> Journal:
    """The better of the two readers that this machine has."""
    if remote.local:
        with contextlib.suppress(ImportError, OSError):
            return Native(unit)
    return Command(unit, remote)


class Native:
    """systemd-python's Reader. ``poll`` never blocks. ``folder``: journal files elsewhere than where this machine keeps its
    own; raises ImportError without systemd-python and OSError when the journal cannot be opened."""

    def __init__(self, unit: str, folder: str | None = None) -> None:
        from systemd import journal  # type: ignore[import-untyped,import-not-found,unused-ignore]

        self._reader: Any = journal.Reader(path=folder)
        self._reader.add_match(_SYSTEMD_UNIT=unit)
        self._reader.add_disjunction()
        self._reader.add_match(UNIT=unit, _PID="1")
        self._reader.seek_tail()
        # After seek_tail the reader stands behind the end; without a step back the first read gives nothing for ever.
        # The step itself gives the record that it ends on, which the next read would pass over.
        self._stepped: Any = self._reader.get_previous(_FIRST_LINES)
        self._count = 0

    def poll(self) -> Reading[list[Entry]]:
        try:
            self._reader.process()
            found: list[Entry] = []
            while len(found) < _MOST_WAITING:
                record, self._stepped = self._stepped or self._reader.get_next(), None
                if not record:
                    break
                self._count += 1
                found.append(record_entry({key: _plain(value) for key, value in record.items()}, self._count))
            return Reading(found)
        except OSError as error:
            return gap(f"journal: {error.strerror or error}")

    def close(self) -> None:
        self._reader.close()


def _plain(value: Any) -> Any:
    """A message that is no UTF-8 comes as bytes, an identifier as a UUID."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.hex if hasattr(value, "hex") and not isinstance(value, float) else value


class Command:
    """``journalctl -o json -f`` in a process of its own; it is started again when it ends."""

    def __init__(self, unit: str, remote: Remote) -> None:
        self._remote = remote
        self._unit = unit
        self._cursor = ""
        self._count = 0
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_WAITING)
        self._process: subprocess.Popen[str] | None = None
        self._why = ""
        self._pumping: threading.Thread | None = None

    def _start(self) -> None:
        place = ["--after-cursor", self._cursor] if self._cursor else ["-n", str(_FIRST_LINES)]
        command = ["journalctl", "-o", "json", "--all", "-f", *place, "-u", self._unit]
        self._process = subprocess.Popen(self._remote.argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)  # fmt: skip
        self._pumping = threading.Thread(target=self._pump, args=(self._process,), name="journal", daemon=True)
        self._pumping.start()

    def _pump(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            self._lines.append(line)
        self._why = process.stderr.read().strip()[:200]

    def poll(self) -> Reading[list[Entry]]:
        ended = self._process is not None and self._process.poll() is not None
        if ended and self._pumping is not None:
            self._pumping.join(2)
        found = self._drain()
        if found or (self._process is not None and not ended):
            return Reading(found)
        # The cursor of the last record is known only now, when all of them have been taken: a reader that is started
        # again goes on behind it.
        why, code = self._why, self._process.returncode if self._process else None
        try:
            self.close()
            self._start()
        except OSError as error:
            return gap(f"journalctl: {error.strerror}")
        if not ended:
            return Reading([])
        return gap(f"journalctl on node {self._remote.name} ended with status {code}: {why or 'it said nothing'}; started again")

    def _drain(self) -> list[Entry]:
        found: list[Entry] = []
        while self._lines:
            line = self._lines.popleft()
            self._count += 1
            with contextlib.suppress(ValueError, AttributeError):
                self._cursor = json.loads(line).get("__CURSOR", self._cursor)
            entry = journal_entry(line, self._count)
            if entry:
                found.append(entry)
        return found

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._pumping is not None:
            self._pumping.join(2)  # it ends at the end of the stream; to close that under it would be an error there
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def tail(remote: Remote, unit: str, *, lines: int, deadline_s: float) -> Reading[bytes]:
    """The last records of a unit as ``journal.jsonl`` holds them."""
    try:
        done = remote.run(["journalctl", "-o", "json", "--all", "--no-pager", "-n", str(lines), "-u", unit], deadline_s=deadline_s)
    except NodeError as error:
        return gap(str(error))
    if done.code != 0:
        return gap(f"journalctl on node {remote.name}: {done.err or f'exit status {done.code}'}")
    return Reading(done.out)
