"""Agreement that one command waits for and another gives: ``opsctl approve``.

A request is one file in the state folder. It says what is to be done, why nobody could be asked, and until when it is
waited for; whoever agrees writes his name into it. A request whose asker is gone, or whose time is up, is told so.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from monitors import fleet
from opsctl import wholefile
from opsctl.pid import started
from opsctl.rollout import operator

_Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Request(msgspec.Struct):
    """``answer`` is "" while it waits, then granted or refused, by ``by``. ``of``: what asks, e.g. a step of a runbook."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{6}$")]
    deployment: str
    kind: str
    what: str
    asked_by: str
    pid: int
    pid_started: Annotated[str, msgspec.Meta(min_length=1)]
    until_unix_s: _Moment
    answer: str = ""
    by: str = ""
    of: str = ""
    since_unix_s: _Moment = 0.0

    def waits(self, now_unix_s: float) -> bool:
        return not self.answer and now_unix_s < self.until_unix_s and started(self.pid) == self.pid_started


class Answered(NamedTuple):
    granted: bool
    by: str


class NoSuchRequest(ValueError):
    """There is none of this name that still waits; the text says which do."""


class Approvals:
    """The requests of one state folder."""

    def __init__(self, env: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        self._folder = fleet.state_root(env) / "approvals"
        self._now = now
        self._who = operator.who(env)["user"]

    def waiting(self) -> list[Request]:
        found = [self._read(path) for path in sorted(self._folder.glob("*.json"))]
        return [one for one in found if one is not None and one.waits(self._now())]

    def answer(self, name: str, *, granted: bool) -> Request:
        """Raises NoSuchRequest."""
        request = next((one for one in self.waiting() if one.id == name), None)
        if request is None:
            known = ", ".join(one.id for one in self.waiting())
            raise NoSuchRequest(f"nothing called {name} waits for an approval; {f'there is {known}' if known else 'nothing waits'}")
        request.answer, request.by = "granted" if granted else "refused", self._who
        self._write(request)
        return request

    def ask(self, deployment: str, kind: str, what: str, wait_s: float, talk: Callable[[str], None], *, of: str = "",
            poll_s: float = 0.2) -> Answered | None:  # fmt: skip
        """Wait until somebody answers, at most ``wait_s``. None when nobody did."""
        if wait_s <= 0:
            return None
        pid, now = os.getpid(), self._now()
        request = Request(secrets.token_hex(3), deployment, kind, what, self._who, pid, started(pid), now + wait_s, of=of,
                          since_unix_s=now)  # fmt: skip
        self._sweep()
        self._write(request)
        talk(f"    waits at most {wait_s:g} s for: opsctl approve {request.id}")
        until = time.monotonic() + wait_s
        path = self._path(request.id)
        try:
            while time.monotonic() < until:
                found = self._read(path)
                if found is not None and found.answer:
                    return Answered(found.answer == "granted", found.by)
                time.sleep(poll_s)
            return None
        finally:
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """What was left by somebody who was killed while he waited."""
        for path in self._folder.glob("*.json"):
            found = self._read(path)
            if found is not None and started(found.pid) != found.pid_started:
                with contextlib.suppress(OSError):  # another account's
                    path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, path: Path) -> Request | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Request)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _write(self, request: Request) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wholefile.write(self._path(request.id), json.dumps(msgspec.to_builtins(request)).encode())
