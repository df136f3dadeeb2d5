"""Whether a runbook could be run as it stands: its form, its class, its commands, its variables."""

from __future__ import annotations

import re
from pathlib import Path

from monitors.judge.verdict import Class
from opsctl import commandline
from opsctl.playbooks.document import Problem
from opsctl.runbooks import values
from opsctl.runbooks.document import Runbook, RunbookError, read

ALWAYS = ("FLEET", "DEPLOYMENT", "BUNDLE")
"""Variables that a run fills in by itself."""
CHANGING = re.compile(r"opsctl (rollout (apply|abort|resume)|service (start|stop|restart)|demo)|kill |systemctl ")


def problems(path: Path) -> list[Problem]:
    """Everything that is wrong with the file, by line."""
    try:
        runbook = read(path)
    except RunbookError as error:
        return list(error.problems)
    found = [] if runbook.verdict in list(Class) else [runbook.problem(2, f"class: {runbook.verdict} is no class of verdict")]
    for step in runbook.steps:
        if wrong := commandline.problem(step.command):
            found.append(runbook.problem(step.line + 1, f"{step.name}: {wrong}"))
        if bool(CHANGING.match(step.command)) and not step.approval:
            found.append(runbook.problem(step.line, f"{step.name}: it ends or changes something, so somebody must agree: approval=..."))
        if step.command.startswith("systemctl ") and not step.managers:
            found.append(runbook.problem(step.line, f"{step.name}: systemctl is for services that systemd runs: manager=systemd"))
        found += [runbook.problem(step.line + 1, f"{step.name}: ${name} is named nowhere in the text")
                  for name in step.variables if name not in ALWAYS and not _named(runbook, name)]  # fmt: skip
    used = {name for step in runbook.steps for name in step.variables}
    for name, source in runbook.fills.items():
        if wrong := values.wrong(source):
            found.append(runbook.problem(2, f"fills: {name}: {wrong}"))
        elif name not in used:
            found.append(runbook.problem(2, f"fills: {name}: no step uses it"))
    return sorted(found, key=lambda one: one.line)


def _named(runbook: Runbook, variable: str) -> bool:
    outside = re.sub(r"^```.*?^```$", "", runbook.text, flags=re.MULTILINE | re.DOTALL)
    return re.search(rf"\b{variable}\b", outside) is not None
