"""What a command answers, and the one place that turns it into text or into the JSON envelope."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from monitors.exit_codes import ExitCode

SCHEMA = "lastbatch/1"


@dataclass(frozen=True)
class Problem:
    """One error: ``where`` is a file, a flag or a service; ``remedy`` what to do."""

    code: str
    message: str
    where: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """``text`` is what a person reads on standard output, ``data`` the same for a program."""

    command: str
    data: Any = None
    text: str = ""
    exit_code: ExitCode = ExitCode.DONE
    errors: tuple[Problem, ...] = ()

    @property
    def status(self) -> str:
        if self.exit_code is ExitCode.DONE:
            return "ok"
        return "error" if self.data is None else "partial"

    def envelope(self) -> Mapping[str, Any]:
        return {
            "schema": SCHEMA, "command": self.command, "status": self.status, "exit_code": int(self.exit_code), "data": self.data,
            "errors": [vars(problem) for problem in self.errors],
        }  # fmt: skip


@dataclass
class Session:
    """The streams and the environment of one call of the command line."""

    env: Mapping[str, str]
    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    exit_code: ExitCode = ExitCode.DONE

    @property
    def attended(self) -> bool:
        return self.stdin.isatty()

    def talk(self, text: str) -> None:
        """Where nobody listens any more (``2>&1 | head``, a terminal that is gone) nothing is said, and what is under way goes on."""
        with contextlib.suppress(OSError):
            self.stderr.write(f"{text}\n")
            self.stderr.flush()

    def show(self, answer: Answer, *, as_json: bool) -> None:
        """Data on standard output, errors on standard error; with JSON everything is in the envelope."""
        self.exit_code = answer.exit_code
        self._print(_json(answer.envelope()) if as_json else answer.text)
        if not as_json:
            for problem in answer.errors:
                where = f"{problem.where}: " if problem.where else ""
                self.talk(f"error: {where}{problem.message}" + (f"\n  {problem.remedy}" if problem.remedy else ""))

    def _print(self, text: str) -> None:
        """Who closed the pipe has seen enough: the command ends as it would have. What cannot be written is an error."""
        try:
            self.stdout.write(f"{text}\n" if text else "")
            self.stdout.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self.stdout.fileno())  # for what is left in the buffer, which would else be a traceback at exit
            if not isinstance(error, BrokenPipeError):
                self.talk(f"error: standard output: {error.strerror}")
                self.exit_code = self.exit_code or ExitCode.INTERNAL


def _json(value: Any) -> str:
    """One line of JSON, which knows no number that is none: such a one is null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
