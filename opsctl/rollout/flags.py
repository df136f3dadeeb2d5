"""Editing the flags of a command line, as a pure function over its arguments.

A flag's value is the next argument unless that begins with ``--`` (so ``-1`` is a value), or what follows ``=``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]*$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class EditError(ValueError):
    """An edit that cannot be made; the text names the option and what to do."""


class Edit(msgspec.Struct, frozen=True):
    """``value`` None: a flag without a value (set), or no flag at all (unset)."""

    flag: str
    value: str | None = None
    unset: bool = False

    def __str__(self) -> str:
        return f"{'--unset' if self.unset else '--set'} {self.flag}{'' if self.value is None else f'={self.value}'}"


def parse_set(text: str) -> Edit:
    """``grammar-backend=none`` or ``disable-overlap-schedule``; leading dashes are allowed. Raises EditError."""
    name, equals, value = text.partition("=")
    name = name.removeprefix("--")
    if not _NAME.match(name):
        raise EditError(f"--set {text}: {name!r} is no flag's name; write --set FLAG=VALUE, or --set FLAG for one without a value")
    return Edit(name, value if equals else None)


def parse_unset(text: str) -> Edit:
    name = text.removeprefix("--")
    if not _NAME.match(name):
        raise EditError(f"--unset {text}: {name!r} is no flag's name; write --unset FLAG")
    return Edit(name, unset=True)


def parse_env(text: str) -> tuple[str, str]:
    """``K=V``. Raises EditError."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.match(name):
        raise EditError(f"--env {text}: write --env NAME=VALUE")
    return name, value


def value(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag's last occurrence; None when it is not there or has none."""
    found = _occurrences(argv, flag)
    if not found:
        return None
    first, end = found[-1]
    return argv[first].partition("=")[2] if "=" in argv[first] else argv[first + 1] if end == first + 2 else None


def edit(argv: Sequence[str], edits: Sequence[Edit], first: int = 0) -> tuple[str, ...]:
    """The new argument vector. What is not named stays as it is and where it is; a new flag goes to the end. Words
    before ``first`` belong to another program (what runs a container) and are not looked at.

    Raises:
        EditError: a flag to unset that is not there, or a flag that occurs more than once.
    """
    kept, now = list(argv[:first]), list(argv[first:])
    for change in edits:
        found = _occurrences(now, change.flag)
        if len(found) > 1:
            raise EditError(f"{change}: the command line has --{change.flag} {len(found)} times; edit the service's own definition")
        wanted = [] if change.unset else [f"--{change.flag}", *([] if change.value is None else [change.value])]
        if found:
            now[found[0][0] : found[0][1]] = wanted
        elif change.unset:
            names = {word[2:].partition("=")[0]: None for word in now if word.startswith("--")}
            raise EditError(
                f"{change}: the command line has no --{change.flag}; it has {', '.join(f'--{name}' for name in names) or 'none'}"
            )
        else:
            now += wanted
    return (*kept, *now)


def _occurrences(argv: Sequence[str], flag: str) -> list[tuple[int, int]]:
    """Half-open ranges of arguments that a flag and its value take."""
    found = []
    for at, argument in enumerate(argv):
        if argument == f"--{flag}":
            has_value = at + 1 < len(argv) and not argv[at + 1].startswith("--")
            found.append((at, at + 2 if has_value else at + 1))
        elif argument.startswith(f"--{flag}="):
            found.append((at, at + 1))
    return found


def same_command(planned: Sequence[str], running: Sequence[str]) -> bool:
    """Whether a process runs what was planned. A script's process shows its interpreter first, so the program
    itself may stand one place later and under its full path; every argument after it must be the same."""
    arguments = list(planned[1:])
    return bool(running) and list(running)[-len(arguments) :] == arguments if arguments else bool(running)
