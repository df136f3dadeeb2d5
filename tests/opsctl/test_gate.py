"""What a gated key lets through of the reading that a proof does: pure."""

from __future__ import annotations

from typing import Any

import pytest

from opsctl.service import gate

TABLES: Any = {
    "units": ["lb.service"],
    "scripts": [gate.sha(b"ASK")],
    "collectors": [gate.sha(b"known")],
    "files": [],
    "pythons": ["python3"],
    "marks": [gate.sha(b"ASK")],
}
JOURNAL = ["journalctl", "-o", "json", "--all", "--no-pager", "-q"]
LINES = ["_SYSTEMD_INVOCATION_ID=" + "0" * 32]


@pytest.mark.parametrize(
    ("argv", "through"),
    [
        ([*JOURNAL, *LINES], True),
        ([*JOURNAL, "--since=-600s", *LINES], True),
        ([*JOURNAL, "--since=-600s"], False),  # everybody's lines
        ([*JOURNAL, "--since=-600s --file=/etc/shadow", *LINES], False),
        ([*JOURNAL, "--since=yesterday", *LINES], False),
        (["journalctl", "-o", "json", "--all", "--no-pager", "-n", "5000", "-u", "lb.service"], True),
        (["journalctl", "-o", "json", "--all", "--no-pager", "-n", "5000", "-u", "ssh.service"], False),
        (["sh", "-c", "ASK", "sh", "/run/opsctl/lb.service", "/nonexistent", "lb.service", "de5b", "--system"], True),
        (["sh", "-c", "ASK", "sh", "/run/opsctl/lb.service", "/etc", "lb.service", "de5b", "--system"], False),
        (["sh", "-c", "ASK", "sh", "/run/opsctl/x.service", "/nonexistent", "x.service", "de5b", "--system"], False),
        (["cat", "/proc/loadavg"], True),
        (["cat", "/proc/loadavg/../kcore"], False),
    ],
)
def test_a_log_may_be_read_from_a_time_on_and_nothing_more(argv: list[str], through: bool) -> None:
    assert (gate.refused(argv, b"", TABLES, "serve") == "") is through


@pytest.mark.parametrize(
    ("argv", "through"),
    [
        (["python3", "-", "{}"], True),
        (["python3", "-u", "-c", "START", "5"], True),
        (["python3", "-u", "-c", "print(1)", "5"], False),
        (["cat", "-", "/etc/shadow"], False),
        (["python3", "-c", "print(1)", "-"], False),
        (["true"], True),
    ],
)
def test_a_collector_runs_under_the_nodes_python_alone(argv: list[str], through: bool) -> None:
    tables = {**TABLES, "scripts": [gate.sha(b"START")]}
    assert (gate.refused(argv, b"known", tables, "serve") == "") is through
    assert gate.refused(argv, b"other", tables, "serve") or argv == ["true"]
