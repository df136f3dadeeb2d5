"""Reading a runbook: Markdown with a front matter and fenced steps.

::

    ---
    class: hang_stopped
    severity: page
    summary: One process is stopped.
    approvals:
      restart: on-call
    fills:
      PID: suspect pid
    ---
    # Title
    ## Section
    ```sh {name=capture deadline=120s expects=0 approval=restart manager=systemd}
    opsctl capture --fleet "$FLEET" --deployment "$DEPLOYMENT"
    ```

What may stand under ``fills`` is in ``values.py``. ``manager``: the step is only for services that this one runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from monitors.exit_codes import ExitCode
from opsctl import textfile, yamldoc
from opsctl.playbooks.document import PlaybookError, Problem

_FRONT = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
_FENCE = re.compile(r"```(?P<head>.*)")
_HEAD = re.compile(r"sh \{(?P<attributes>[^{}]*)\}")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_ATTRIBUTES = ("name", "deadline", "expects", "approval", "manager")
MANAGERS = ("systemd", "systemd-user", "embedded")
"""What a fleet file may say under ``service``."""
_VARIABLE = re.compile(r"\$\{?([A-Z_]+)(:-)?")
LONGEST_S = 86_400


class RunbookError(PlaybookError):
    """``problems`` holds each thing that is wrong, with file and line."""


@dataclass(frozen=True)
class Step:
    """One fenced command. ``expects`` are the exit codes that mean that it went as wished; ``line`` is the fence's own;
    ``managers``: for whose services it is (none: for all); ``before``: the text of sections between the step before and this one."""

    name: str
    command: str
    deadline_s: float
    expects: tuple[int, ...]
    approval: str
    section: str
    line: int
    managers: tuple[str, ...] = ()
    before: str = ""

    def applies(self, manager: str) -> bool:
        """Whether it is for services that ``manager`` runs; an empty one is not known, and leaves nothing out."""
        return not self.managers or not manager or manager in self.managers

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in _VARIABLE.findall(self.command)))

    @property
    def needed(self) -> tuple[str, ...]:
        """The variables that need a value: one with a default (``${NAME:-DEFAULT}``) does not."""
        return tuple(dict.fromkeys(name for name, default in _VARIABLE.findall(self.command) if not default))


@dataclass(frozen=True)
class Runbook:
    """``approvals``: who may agree to each kind of step that needs it; ``fills``: where a run finds the value of a variable
    by itself; ``text`` is the whole document, ``after`` what stands behind the last step."""

    name: str
    verdict: str
    severity: str
    summary: str
    approvals: Mapping[str, str]
    steps: tuple[Step, ...]
    text: str
    path: str
    fills: Mapping[str, str] = field(default_factory=dict)
    after: str = ""

    def problem(self, line: int, text: str) -> Problem:
        return Problem(self.path, line, text)


def read(path: Path) -> Runbook:
    """Raises RunbookError with every problem found."""
    try:
        text = textfile.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RunbookError([Problem(str(path), 1, f"cannot be read: {getattr(error, 'strerror', None) or error}")]) from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Runbook:
    """``source`` is what errors call the file. Raises RunbookError with every problem found."""
    problems: list[Problem] = []
    head = _front_matter(text, source, problems)
    steps, after = _steps(text, source, problems)
    names = [step.name for step in steps]
    problems += [
        Problem(source, step.line, f"a second step is called {step.name}") for at, step in enumerate(steps) if step.name in names[:at]
    ]
    approvals = head.get("approvals") or {}
    known = ", ".join(approvals) or "none"
    unknown = [step for step in steps if step.approval and step.approval not in approvals]
    problems += [Problem(source, step.line, f"{step.name}: approval {step.approval} is not in the front matter, which has {known}")
                 for step in unknown]  # fmt: skip
    if problems:
        raise RunbookError(sorted(problems, key=lambda one: one.line))
    return Runbook(
        Path(source).stem, str(head["class"]), str(head["severity"]), str(head["summary"]), approvals, tuple(steps), text, source,
        head.get("fills") or {}, after,
    )  # fmt: skip


def _front_matter(text: str, source: str, problems: list[Problem]) -> dict[str, Any]:
    found = _FRONT.match(text)
    if found is None:
        problems.append(Problem(source, 1, "no front matter: the file begins with --- and class, severity, summary, approvals"))
        return {}
    try:
        _, head = yamldoc.load(found[1])
    except yaml.YAMLError as error:
        problems.append(Problem(source, 1 + yamldoc.line(error), f"front matter: {yamldoc.said(error)}"))
        return {}
    if not isinstance(head, dict):
        problems.append(Problem(source, 2, "front matter: not key: value lines"))
        return {}
    for key in ("class", "severity", "summary"):
        if not isinstance(head.get(key), str) or not head[key].strip():
            problems.append(Problem(source, 2, f"front matter: {key} is missing"))
    approvals = head.get("approvals")
    if approvals is not None and not (isinstance(approvals, dict) and all(isinstance(who, str) and who for who in approvals.values())):
        problems.append(Problem(source, 2, "front matter: approvals says for each kind who may agree"))
        head["approvals"] = {}
    fills = head.get("fills")
    if fills is not None and not (isinstance(fills, dict) and all(isinstance(word, str) for pair in fills.items() for word in pair)):
        problems.append(Problem(source, 2, "front matter: fills says for each variable where its value is found"))
        head["fills"] = {}
    return head


def _steps(text: str, source: str, problems: list[Problem]) -> tuple[list[Step], str]:
    """The steps, and the text behind the last one."""
    steps: list[Step] = []
    section, begun, head, body, prose = "", 0, "", list[str](), list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        fence = _FENCE.fullmatch(line)
        if not begun:
            if line.startswith("## "):
                section = line[3:].strip()
            if fence:
                begun, head, body = number, fence["head"].strip(), []
            elif section:  # what stands before the first is for those who copy commands by hand
                prose.append(line)
        elif fence and not fence["head"].strip():
            step = _step(head, "\n".join(body).strip(), section, source, begun, problems)
            if step:
                steps.append(replace(step, before="\n".join(prose).strip()))
                prose = []
            else:
                prose += [f"    {one}" for one in body]
            begun = 0
        else:
            body.append(line)
    if begun:
        problems.append(Problem(source, begun, "the fence is not closed"))
    return steps, "\n".join(prose).strip()


def _step(head: str, command: str, section: str, source: str, line: int, problems: list[Problem]) -> Step | None:
    """None for a fence that is no step: an example in the text."""
    found = _HEAD.fullmatch(head)
    if found is None:
        if head.startswith("sh"):
            problems.append(Problem(source, line, "not the head of a step; write ```sh {name=capture deadline=120s expects=0}"))
        return None
    given = {name: value for name, _, value in (word.partition("=") for word in found["attributes"].split())}
    wrong = [f"{name} is no attribute; there are {', '.join(_ATTRIBUTES)}" for name in given if name not in _ATTRIBUTES]
    wrong += [] if _NAME.fullmatch(given.get("name", "")) else ["name: small letters, digits and hyphens"]
    deadline = re.fullmatch(r"([1-9]\d*)s", given.get("deadline", ""))
    deadline_s = int(deadline[1]) if deadline else 0
    wrong += [] if 0 < deadline_s <= LONGEST_S else [f"deadline: seconds from 1s to {LONGEST_S}s"]
    codes = given.get("expects", "").split(",")
    known = {str(int(code)) for code in ExitCode}
    wrong += [] if set(codes) <= known else [f"expects: an exit code, one of {', '.join(sorted(known, key=int))}"]
    managers = tuple(given["manager"].split(",")) if "manager" in given else ()
    wrong += [f"manager: {one or 'nothing'} runs no service; there are {', '.join(MANAGERS)}" for one in managers if one not in MANAGERS]
    lines = command.splitlines()
    wrong += [] if len(lines) == 1 else [f"a step is one command; this one has {len(lines)} lines"]
    if wrong:
        problems += [Problem(source, line, f"{given.get('name') or 'a step'}: {one}") for one in wrong]
        return None
    return Step(
        given["name"], command, float(deadline_s), tuple(int(code) for code in codes), given.get("approval", ""), section, line, managers
    )
