"""What a command answers, and the one place that turns it into text or into the JSON envelope."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
        self.stderr.write(f"{text}\n")
        self.stderr.flush()

    def show(self, answer: Answer, *, as_json: bool) -> None:
        """Data on standard output, errors on standard error; with JSON everything is in the envelope."""
        self.exit_code = answer.exit_code
        if as_json:
            self.stdout.write(json.dumps(answer.envelope()) + "\n")
        elif answer.text:
            self.stdout.write(answer.text + "\n")
        if not as_json:
            for problem in answer.errors:
                where = f"{problem.where}: " if problem.where else ""
                self.talk(f"error: {where}{problem.message}" + (f"\n  {problem.remedy}" if problem.remedy else ""))
        self.stdout.flush()
