"""Runbooks are read at night and their steps are run as they stand, so what can be checked by day is checked here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from monitors.judge.verdict import Class, Verdict
from opsctl import commandline
from opsctl.runbooks import lint
from opsctl.runbooks.document import read

FOLDER = Path(__file__).parent.parent / "runbooks"
FILES = sorted(FOLDER.glob("*.md"))
IDS = [path.stem for path in FILES]

NOTHING_TO_DO = {Class.healthy, Class.idle_not_hung}
PROGRAMS = commandline.programs()
ALSO = {"crash_at_first_decode", "bad_rollout"}
"""Runbooks for what no verdict names."""

SECTIONS = [
    "What it looks like", "How to be sure", "Evidence first", "Restore service", "What must not be done", "Confirm", "Whom to tell",
    "What to file upstream",
]  # fmt: skip


@pytest.mark.parametrize("verdict", [one for one in Class if one not in NOTHING_TO_DO])
def test_the_runbook_that_a_verdict_names_exists(verdict: Class) -> None:
    assert (FOLDER.parent / Verdict(verdict, 1.0).runbook).is_file()


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_the_front_matter_says_class_severity_summary_and_approvals(path: Path) -> None:
    book = read(path)
    assert book.verdict == path.stem or path.stem in ALSO
    assert book.severity == ("page" if Class(book.verdict).is_alarm else "info"), "who is paged is what the monitor pages for"
    assert book.summary.endswith(".")
    assert book.approvals


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_all_sections_are_there_in_order_and_none_is_empty(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert all(part.strip() for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:])


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_it_begins_with_what_to_set_and_no_step_needs_what_the_text_does_not_name(path: Path) -> None:
    book = read(path)
    body = re.split(r"^# .+\n\n", book.text, maxsplit=1, flags=re.MULTILINE)[1]
    first = re.match(r"Set first: `export ([^`]+)`", body)
    assert first, "what to set is not the first thing"
    assert {"FLEET", "DEPLOYMENT"} <= {word.split("=")[0] for word in first[1].split()}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_step_can_be_run_by_what_is_installed(path: Path) -> None:
    assert lint.problems(path) == []
    assert any(step.command.startswith("opsctl capture") for step in read(path).steps), "evidence has no step"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_what_only_looks_needs_no_approval(path: Path) -> None:
    for step in read(path).steps:
        assert bool(lint.CHANGING.match(step.command)) == bool(step.approval), step.command


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_step_is_not_cut_off_before_the_deadlines_of_what_it_runs(path: Path) -> None:
    boot_s = 720  # the default of both; a restart stops, starts and waits, a rollout boots twice when it reverts
    least = {"opsctl service restart-group": 3 * boot_s, "opsctl rollout apply": 4 * boot_s, "opsctl rollout abort": 2 * boot_s}
    for step in read(path).steps:
        assert step.deadline_s <= 3600
        for program, needed_s in least.items():
            if step.command.startswith(program):
                assert step.deadline_s >= needed_s, step.command


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_reference_is_dead(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert (path.parent / target).exists(), f"dead link: {target}"
    quoted = re.findall(r"`([^`\n]+)`", text)
    for word in quoted:
        if re.fullmatch(r"hang_[a-z_]+|[a-z]+_not_hung", word):
            assert word in list(Class) and (FOLDER / f"{word}.md").exists(), f"no such class or runbook: {word}"
        if re.match(r"(opsctl|hang-monitor) ", word) and "NAME" not in word:
            command: Any = PROGRAMS[word.split()[0]]
            for part in word.split()[1:]:
                if hasattr(command, "commands"):
                    assert part in command.commands, f"no such command: {word}"
                    command = command.commands[part]
