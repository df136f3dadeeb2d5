"""docs/REFERENCE.md is what the code says: flags, routes, metrics, the fleet file, exit codes, every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monitors.exit_codes import ExitCode
from opsctl import commandline, reference

PAGE = Path(__file__).parents[2] / "docs/REFERENCE.md"


def test_the_page_on_disk_is_the_one_that_the_code_gives() -> None:
    assert PAGE.read_text() == reference.page(), "run: make reference"


def test_every_command_option_and_exit_code_is_on_the_page() -> None:
    page = reference.page()
    missing = [f"`{path}`" for program in ("opsctl", "hang-monitor") for path in leaves(program, commandline.programs()[program])]
    assert [name for name in missing if name not in page] == []
    assert all(f"| {int(code)} | {code.name.lower()} |" in page for code in ExitCode)


def leaves(path: str, command: Any) -> list[str]:
    if hasattr(command, "commands"):
        return [leaf for name in command.commands for leaf in leaves(f"{path} {name}", command.commands[name])]
    return [] if command.hidden else [path]


def test_keys_of_the_fleet_file_are_told_with_type_default_and_meaning() -> None:
    page = reference.page()
    assert "| `deployment.NAME.watchdog_s` | float | `0.0` | 0: the dialect's default |" in page
    assert "| `deployment.NAME.node[].service[].unit` | str | needed |" in page
    assert '| `deployment.NAME.on_wedge.action` | `page` or `playbook` or `restart` | `"page"` |' in page
    assert "`path`" not in [row.split(" | ")[0].strip("| ") for row in page.splitlines()], "what the reader fills in is no key"
