"""What each kind of step comes to: a command line, a fault that is armed, a page that is sent."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monitors.capture.redact import Policy, redact
from opsctl import commandline
from opsctl.playbooks.schema import Change, Step

_WORDS_STAY = Policy(include_prompts=True)
MODULES = {"opsctl": "opsctl.cli", "hang-monitor": "monitors.cli"}


@dataclass(frozen=True)
class Place:
    """The deployment that a playbook is run on."""

    fleet: str
    deployment: str
    api: str = "http://127.0.0.1:30000"
    api_key_file: str = ""
    env: Mapping[str, str] | None = None  # of the commands; None: this process's own
    today: datetime.date = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date())

    @property
    def variables(self) -> Mapping[str, str]:
        return {"FLEET": self.fleet, "DEPLOYMENT": self.deployment}


def words(step: Step, place: Place, playbook: str) -> list[str]:
    """The command of a ``run``, ``rollout``, ``load`` or ``repro`` step as one would type it. Raises ValueError for an unknown variable."""
    where = ["--fleet", place.fleet, "--deployment", place.deployment]
    if step.rollout is not None:
        changes = _change(step.rollout, place.today)
        return ["opsctl", "rollout", "apply", *where, *changes, "--reason", f"playbook {playbook}", "--yes", "--json"]
    if step.load is not None:
        key = ["--api-key-file", place.api_key_file] if place.api_key_file else []
        return ["opsctl", "load", "run", "--url", place.api, *key, *_flags(step.load), "--json"]
    if step.repro is not None:
        return ["opsctl", "repro", "run", playbook, *where, "--step", step.name, "--json"]
    return commandline.filled(step.run, place.variables)


def told(step: Step, place: Place, playbook: str) -> str:
    """A step in one line, for people and logs: without secrets."""
    if step.fault:
        return f"arm the fault {step.fault} (lifted at the end)"
    if step.page:
        return f"page: {step.page}"
    return redact(shlex.join(words(step, place, playbook)), "playbook.json", _WORDS_STAY)[0]


def executable(command: list[str]) -> list[str]:
    """The same command with our own programs run by this interpreter, wherever they are installed."""
    module = MODULES.get(command[0])
    return [sys.executable, "-m", module, *command[1:]] if module else command


def _change(change: Change, today: datetime.date) -> list[str]:
    found: list[str] = []
    for edit in change.edits():
        found += ["--unset", edit.flag] if edit.unset else ["--set", edit.flag if edit.value is None else f"{edit.flag}={edit.value}"]
    for name, value in change.env.items():
        found += ["--env", f"{name}={value}"]
    for option, value in change.options(today).items():
        for one in value if isinstance(value, list) else [value]:
            found += [option] if one is True else [option, str(one)]
    return found


def _flags(given: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            found += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return found
