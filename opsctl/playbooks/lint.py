"""Whether a playbook could run as it stands: its form, its name, its commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from opsctl import commandline, textfile
from opsctl.playbooks.actions import Place, words
from opsctl.playbooks.document import Document, PlaybookError, Problem, parse

_ANYWHERE = Place("fleet.toml", "deployment")


def read(path: Path) -> Document:
    """Raises PlaybookError."""
    try:
        text = textfile.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlaybookError([Problem(str(path), 1, f"cannot be read: {getattr(error, 'strerror', None) or error}")]) from error
    return parse(text, str(path))


def problems(path: Path) -> list[Problem]:
    """Everything that is wrong with the file, by line. A command that ``needs`` waits for may be unknown as yet."""
    try:
        found = read(path)
    except PlaybookError as error:
        return list(error.problems)
    wrong = []
    if found.playbook.name != path.stem:
        wrong.append(found.problem(("name",), f'"{found.playbook.name}" is not the name of the file, {path.stem}'))
    awaited = [need.command for need in found.playbook.needs if need.command and not commandline.has_command(need.command)]
    lines = []
    for where, step in found.steps():
        if step.action in ("run", "rollout", "load"):
            try:
                lines.append(((*where, step.action), shlex.join(words(step, _ANYWHERE, found.playbook.name))))
            except ValueError as error:
                wrong.append(found.problem((*where, step.action), str(error)))
    lines += [((*where, "tolerance", "run"), str(one.tolerance["run"])) for where, one in found.expectations() if one.probe == "command"]
    for where, line in lines:
        text = commandline.problem(line)
        if text and not any(line.startswith(f"opsctl {command}") for command in awaited):
            wrong.append(found.problem(where, text))
    return sorted(wrong, key=lambda one: one.line)
