"""Whether a command line that stands in a document is one that the installed programs take. Nothing is run."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from typing import Any

import typer

SYSTEM = ("journalctl", "kill", "systemctl")
"""Programs of the system that a document may use; of these only the name is checked."""


_DEFAULT = re.compile(r"\$\{([A-Z_]+):-([^${}]*)\}")  # as a shell has it


def programs() -> Mapping[str, Any]:
    """The command trees of our own programs."""
    from monitors.cli import app as hang_monitor
    from opsctl.cli import app as opsctl  # it stands on the rooms that ask here

    return {"opsctl": typer.main.get_command(opsctl), "hang-monitor": typer.main.get_command(hang_monitor)}


def problem(line: str) -> str:
    """What is wrong with a command line; empty when its program would take it."""
    try:
        words = shlex.split(_DEFAULT.sub(r"\2", line))
    except ValueError as error:
        return f"{line}: {error}"
    known = programs()
    if not words or words[0] not in (*known, *SYSTEM):
        return f"{words[0] if words else 'nothing'} is no program that a document may run; there are {', '.join((*known, *SYSTEM))}"
    if words[0] in SYSTEM:
        return ""
    command, path = known[words[0]], words.pop(0)
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            near = difflib.get_close_matches(words[0] if words else "", command.commands, 1)
            return f"{path} {words[0] if words else ''}: no such command" + (f'; did you mean "{path} {near[0]}"?' if near else "")
        path += f" {words[0]}"
        command = command.commands[words.pop(0)]
    try:
        command.make_context(path, list(words), resilient_parsing=False)
    except typer.Exit:
        return ""  # --help
    except Exception as error:  # the click that typer carries does not export its exceptions whole
        told = getattr(error, "format_message", None)
        if told is None:
            raise
        return f"{path}: {told()}"
    return ""


def has_command(words: str) -> bool:
    """Whether opsctl has this command, such as ``load run`` or ``repro``."""
    command = programs()["opsctl"]
    for word in words.split():
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return False
    return True


def filled(line: str, values: Mapping[str, str]) -> list[str]:
    """The words of a command line with ``$NAME`` and ``${NAME}`` filled in, each value one word or part of one; where
    ``${NAME:-DEFAULT}`` stands, without a value it is that one.

    Raises ValueError for a variable that has no value.
    """
    words = []
    for word in shlex.split(line):
        made = _DEFAULT.sub(lambda found: values.get(found[1], "") or found[2], word)
        for name in sorted(values, key=len, reverse=True):
            made = made.replace(f"${{{name}}}", values[name]).replace(f"${name}", values[name])
        if "$" in made and not any("$" in value for value in values.values()):
            raise ValueError(f"{word}: no value for this variable; there are {', '.join(f'${name}' for name in values)}")
        words.append(made)
    return words
