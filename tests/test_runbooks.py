"""Runbooks are read at night and their steps are run as they stand, so what can be checked by day is checked here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from monitors.cli import app as hang_monitor
from monitors.exit_codes import ExitCode
from monitors.judge.verdict import Class, Verdict
from opsctl.cli import app as opsctl

FOLDER = Path(__file__).parent.parent / "runbooks"
FILES = sorted(FOLDER.glob("*.md"))
IDS = [path.stem for path in FILES]

NOTHING_TO_DO = {Class.healthy, Class.idle_not_hung}
PROGRAMS = {"opsctl": typer.main.get_command(opsctl), "hang-monitor": typer.main.get_command(hang_monitor)}
SYSTEM = {"journalctl", "kill", "systemctl"}
"""Programs of the system that a step may use; of these only the name is checked."""

SECTIONS = [
    "What it looks like", "How to be sure", "Evidence first", "Restore service", "What must not be done", "Confirm", "Whom to tell",
    "What to file upstream",
]  # fmt: skip
FENCE = re.compile(r"^```(?P<head>.*)\n(?P<body>(?:(?!```).*\n)*?)```$", re.MULTILINE)
STEP = re.compile(
    r"sh \{name=(?P<name>[a-z][a-z-]*) deadline=(?P<deadline_s>\d+)s expects=(?P<expects>\d+)(?: approval=(?P<approval>[a-z-]+))?\}"
)


def front_matter(text: str) -> dict[str, Any]:
    """``key: value`` lines between the two rules, one level of nesting."""
    found: dict[str, Any] = {}
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert head, "no front matter"
    for line in head[1].splitlines():
        key, _, value = line.partition(":")
        if line.startswith("  "):
            found[list(found)[-1]][key.strip()] = value.strip()
        else:
            found[key] = value.strip() or {}
    return found


def steps(text: str) -> list[tuple[dict[str, str], str]]:
    """Attributes and command of each step."""
    found = []
    for fence in FENCE.finditer(text):
        head = STEP.fullmatch(fence["head"])
        assert head, f"not the head of a step: {fence['head']}"
        found.append((head.groupdict(), fence["body"].strip()))
    return found


def check_command(line: str) -> None:
    """Parse it as its program would, short of running it."""
    words = shlex.split(line)
    assert words[0] in PROGRAMS.keys() | SYSTEM, f"{words[0]} is no program that a step may use"
    if words[0] not in PROGRAMS:
        return
    command: Any = PROGRAMS[words.pop(0)]
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no such command: {line}"
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)  # raises on an unknown option, a missing one and a wrong type


@pytest.mark.parametrize("verdict", [one for one in Class if one not in NOTHING_TO_DO])
def test_the_runbook_that_a_verdict_names_exists(verdict: Class) -> None:
    assert (FOLDER.parent / Verdict(verdict, 1.0).runbook).is_file()


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_the_front_matter_says_class_severity_summary_and_approvals(path: Path) -> None:
    found = front_matter(path.read_text())
    assert set(found) == {"class", "severity", "summary", "approvals"}
    assert found["class"] == path.stem
    assert found["severity"] == ("page" if Class(path.stem).is_alarm else "info"), "who is paged is what the monitor pages for"
    assert found["summary"].endswith(".")
    assert found["approvals"] and all(found["approvals"].values())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_all_sections_are_there_in_order_and_none_is_empty(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert all(part.strip() for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:])


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_it_begins_with_what_to_set_and_no_step_needs_what_the_text_does_not_name(path: Path) -> None:
    text = path.read_text()
    body = re.split(r"^# .+\n\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    first = re.match(r"Set first: `export ([^`]+)`", body)
    assert first, "what to set is not the first thing"
    exported = {word.split("=")[0] for word in first[1].split()}
    assert {"FLEET", "DEPLOYMENT"} <= exported
    told = FENCE.sub("", text)
    for _, command in steps(text):
        for name in set(re.findall(r"\$\{?([A-Z_]+)", command)) - exported:
            assert re.search(rf"\b{name}\b", told), f"${name} is named nowhere outside the steps"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_step_can_be_run_by_what_is_installed(path: Path) -> None:
    found = steps(path.read_text())
    for _, body in found:
        for line in body.splitlines():
            check_command(line)
    assert any(command.startswith("opsctl capture") for _, command in found), "evidence has no step"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_steps_have_names_of_their_own_known_exit_codes_and_approvals_of_the_front_matter(path: Path) -> None:
    text = path.read_text()
    found, approvals = [attributes for attributes, _ in steps(text)], front_matter(text)["approvals"]
    names = [attributes["name"] for attributes in found]
    assert len(names) == len(set(names))
    for attributes in found:
        assert int(attributes["expects"]) in list(ExitCode)
        assert 0 < int(attributes["deadline_s"]) <= 3600
        assert attributes["approval"] is None or attributes["approval"] in approvals


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_what_changes_or_ends_something_needs_an_approval_and_what_looks_needs_none(path: Path) -> None:
    changing = re.compile(r"opsctl (rollout (apply|abort|resume)|service (start|stop|restart)|demo)|kill |systemctl ")
    for attributes, command in steps(path.read_text()):
        assert bool(changing.match(command)) == (attributes["approval"] is not None), command


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_step_is_not_cut_off_before_the_deadlines_of_what_it_runs(path: Path) -> None:
    boot_s = 720  # the default of both; a restart stops, starts and waits, a rollout boots twice when it reverts
    least = {"opsctl service restart-group": 3 * boot_s, "opsctl rollout apply": 4 * boot_s, "opsctl rollout abort": 2 * boot_s}
    for attributes, command in steps(path.read_text()):
        for program, needed_s in least.items():
            if command.startswith(program):
                assert int(attributes["deadline_s"]) >= needed_s, command


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


@pytest.mark.parametrize(
    "line",
    [
        "opsctl no-such-command",
        "opsctl rollout no-such-command",
        'opsctl capture --fleet "$FLEET" --no-such-option',
        "opsctl capture --budget-s soon",
        "opsctl bundle show",
        "hang-monitor doctor",
        "no-such-program --fleet x",
    ],
)
def test_a_step_that_cannot_be_run_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|valid number|is no program"):
        check_command(line)
