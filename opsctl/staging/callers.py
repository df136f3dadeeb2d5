"""The clients of a stage: how its fleet file names them, and who watches that they are served by its server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from opsctl.staging.waiting import StageError

_END_S = 10.0


def table(deployment: str, name: str, request: Mapping[str, Any], expect: str, *, never_live: bool = False, via: str = "") -> str:
    """A caller of the fleet file, as TOML. ``via``: the API by which the client comes, where that is not the server's own."""
    found = f"[[deployment.{deployment}.caller]]\nname = {json.dumps(name)}\nexpect = {json.dumps(expect)}\nrequest = {_inline(request)}\n"
    found += 'probe = "never-live"\n' if never_live else ""
    return found + (f"via = {json.dumps(via)}\n" if via else "")


def _inline(value: object) -> str:
    """A JSON value as TOML on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_inline(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


class CallerWatch:
    """``opsctl callers watch --json``: it pages and ends once a client is served by somebody else."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._verdict: str | None = None

    def verdict(self) -> str:
        """What it ended with; empty while it goes on. Raises StageError when it ended without saying anything."""
        if self._verdict is None and self.process.poll() is not None:
            assert self.process.stdout is not None
            try:
                self._verdict = str(json.loads(self.process.stdout.read())["data"]["verdict"])
            except (ValueError, KeyError, TypeError) as error:
                raise StageError(f"opsctl callers watch ended with {self.process.returncode} and no verdict") from error
        return self._verdict or ""

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
