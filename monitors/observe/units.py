"""A service as its manager shows it: ``systemctl show``, and a table of attempts that an operator kept."""

from __future__ import annotations

import csv

from monitors.judge.scene import Cite, Unit

_EXIT_COLUMNS = ("exit", "exit_code", "status", "code")


def from_show(text: str, artefact: str) -> Unit:
    """``KEY=VALUE`` lines. Raises ValueError when there is none."""
    values: dict[str, str] = {}
    cites: dict[str, Cite] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, value = line.partition("=")
        if equals and key.isalnum():
            values[key], cites[key] = value.strip()[:400], Cite(artefact, number)
    if not values:
        raise ValueError("no KEY=VALUE line in it")
    return Unit(values, cites)


def from_attempts(text: str, artefact: str) -> Unit:
    """One row an attempt with its exit status: how often it ended otherwise than with 0. Raises ValueError when no
    column says so."""
    rows = list(csv.DictReader(text.splitlines()))
    column = next((name for name in (rows[0] if rows else {}) if name and name.strip().lower() in _EXIT_COLUMNS), None)
    if column is None:
        raise ValueError("no column of exit statuses")
    ends = [(number, value) for number, row in enumerate(rows, 2) if (value := (row.get(column) or "").strip()) not in ("", "0")]
    cite = Cite(artefact, ends[-1][0] if ends else 1)
    return Unit({"FailedAttempts": str(len(ends)), "LastExit": ends[-1][1] if ends else "0"}, {"FailedAttempts": cite, "LastExit": cite})
