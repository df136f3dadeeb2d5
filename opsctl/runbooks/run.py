"""Going through a runbook step by step: each command is shown, agreed to where it must be, run under its deadline, and kept.

It ends at the first step that does not go as it should, or that nobody agrees to: what comes after leans on it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from monitors.capture.redact import redact
from monitors.exit_codes import ExitCode
from opsctl import commandline
from opsctl.approvals import Answered
from opsctl.playbooks.actions import executable
from opsctl.playbooks.process import Ran
from opsctl.runbooks.document import Runbook, Step
from opsctl.runbooks.values import Told

_SHOWN_LINES = 6  # of what a step that failed said
_KEPT_CHARACTERS = 8_000
_WAITS = re.compile(r"\d+ s so far, ")
_TOLD = (ExitCode.REVERTED, ExitCode.STUCK, ExitCode.HELD, ExitCode.LOCKED, ExitCode.UNREACHABLE)
"""Exit codes of a step that say more than that it failed: the run ends with the same."""


class Choice(StrEnum):
    """``hold``: it cannot be done now, and what comes after leans on it."""

    run = "run"
    skip = "skip"
    hold = "hold"
    quit = "quit"


@dataclass(frozen=True)
class Decision:
    """What is done with a step. ``command`` differs from the runbook's where somebody edited it; ``by`` says who agreed."""

    choice: Choice
    command: str = ""
    by: str = ""
    why: str = ""


class StepRecord(msgspec.Struct, frozen=True):
    """``outcome``: passed, failed, skipped, held (nobody agreed, or a value is missing), interrupted, or left (by the person
    before it). ``approved_by``: who agreed that it runs; ``answered_by``: who said that it does not. ``filled``: the variables
    that the run found the value of by itself, and where. ``said`` is redacted."""

    name: str
    section: str
    command: str
    outcome: str
    edited: bool = False
    began_utc: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    approved_by: str = ""
    why: str = ""
    said: str = ""
    filled: dict[str, str] = {}
    answered_by: str = ""


class RunRecord(msgspec.Struct):
    """One run of a runbook. ``outcome``: done, failed, held, interrupted; empty while it goes on."""

    id: str
    runbook: str
    deployment: str
    by: str
    began_utc: str
    bundle: str = ""
    steps: list[StepRecord] = []
    outcome: str = ""
    ended_utc: str = ""

    @property
    def fidelity(self) -> float | None:
        """The share of the steps that ran which ran as they stand. None when none ran."""
        ran = [step for step in self.steps if step.outcome in ("passed", "failed", "interrupted")]
        return sum(not step.edited for step in ran) / len(ran) if ran else None


class Decider(Protocol):
    """Who says what is done with the next step: a person at the terminal, or what the command line allowed."""

    def decide(self, step: Step, command: str, missing: Mapping[str, str]) -> Decision:
        """``missing``: the variables of the step that have no value, and why not."""
        ...


@dataclass
class Run:
    """``values`` fills the variables in; a bundle that a step makes becomes $BUNDLE where none was given, else $SECOND.
    ``find`` is asked for what has no value when a step needs it. ``manager`` runs the deployment's services. ``aloud``: the
    runbook's own words are told too, each part before the step that it leads to."""

    runbook: Runbook
    decider: Decider
    execute: Callable[[list[str], float], Ran]
    keep: Callable[[RunRecord], None]
    talk: Callable[[str], None]
    utc: Callable[[], str]
    values: dict[str, str] = field(default_factory=dict)
    find: Callable[[str, str], Told] = lambda name, bundle: Told("", "")
    manager: str = ""
    aloud: bool = False
    lost: str = ""  # why the record could not be written, where it could not
    _found: dict[str, str] = field(default_factory=dict)

    def go(self, record: RunRecord) -> ExitCode:
        code = ExitCode.DONE
        for at, step in enumerate(self.runbook.steps, 1):
            if self.aloud and step.before:
                self.talk(f"\n{step.before}")
            self.talk(f"\n[{at}/{len(self.runbook.steps)}] {step.section}: {step.name}")
            try:
                found = self._one(step)
            except KeyboardInterrupt:
                found, code = _left(step, "interrupted"), ExitCode.INTERRUPTED
            record.steps.append(found)
            record.bundle = self.values.get("BUNDLE", "")
            self.talk(f"    {found.outcome}{f': {found.why}' if found.why else ''}{f' ({found.seconds:.1f} s)' if found.seconds else ''}")
            if found.outcome == "failed":
                if not self.aloud:
                    for line in _last_words(found.said):
                        self.talk(f"    | {line}")
                code = ExitCode(found.exit_code) if found.exit_code in _TOLD else ExitCode.FOUND
            elif found.outcome == "held":
                code = ExitCode.HELD
            elif found.outcome in ("interrupted", "left"):
                code = ExitCode.INTERRUPTED
            self._keep(record)
            if code is not ExitCode.DONE:
                left = ", ".join(one.name for one in self.runbook.steps[at:])
                self.talk(f"not reached: {left}; once it is clear why: opsctl runbook run {record.runbook}" if left else "")
                break
        if code is ExitCode.DONE and self.aloud and self.runbook.after:
            self.talk(f"\n{self.runbook.after}\n")
        ends = {ExitCode.DONE: "done", ExitCode.HELD: "held", ExitCode.INTERRUPTED: "interrupted"}
        record.outcome, record.ended_utc = ends.get(code, "failed"), self.utc()
        self._keep(record)
        return code

    def _keep(self, record: RunRecord) -> None:
        """A disk that is full is no reason to leave a server down: it is told, and the run goes on."""
        try:
            self.keep(record)
        except OSError as error:
            if not self.lost:
                self.talk(f"    the record cannot be written, and the run goes on: {error}")
            self.lost = str(error)

    def _one(self, step: Step) -> StepRecord:
        if not step.applies(self.manager):
            return _left(step, "skipped", f"only for services under {' or '.join(step.managers)}; these are under {self.manager}")
        missing = self._fill(step)
        shown = step.command if missing else shlex.join(commandline.filled(step.command, self.values))
        self.talk(f"    $ {shown}    (at most {step.deadline_s:g} s)")
        for name in (name for name in step.variables if name in self._found):
            self.talk(f"    ${name} is {self._found[name]}")
        decision = self.decider.decide(step, shown, missing)
        ends = {Choice.quit: "left", Choice.skip: "skipped", Choice.hold: "held"}
        if decision.choice in ends:
            return msgspec.structs.replace(_left(step, ends[decision.choice], decision.why), answered_by=decision.by)
        command = decision.command or shown
        try:
            words = commandline.filled(command, self.values)
        except ValueError as error:  # an edited one: a quote that is open, a name that is not known
            self.talk(f"    not run: {error}")
            return msgspec.structs.replace(_left(step, "failed", f"not run: {error}"), command=command, edited=command != shown)
        began = self.utc()
        try:
            ran = self.execute(executable(words), step.deadline_s)
        except (OSError, ValueError) as error:  # no folder for temporary files; a character that no command can have
            ran = Ran(None, "", 0.0, f"not run: {error}")
        self._note_bundle(ran.said)
        said, _ = redact(ran.said[-_KEPT_CHARACTERS:], "runbook.log")
        good = ran.code in step.expects
        kept, _ = redact(command, "runbook.log")
        return StepRecord(step.name, step.section, kept, "passed" if good else "failed", edited=command != shown, began_utc=began,
                          seconds=round(ran.seconds, 3), exit_code=ran.code, approved_by=decision.by, why="" if good else ran.ending,
                          said=said, filled={name: self._found[name] for name in step.variables if name in self._found})  # fmt: skip

    def _fill(self, step: Step) -> dict[str, str]:
        """Find what the step needs and nobody gave. Returns what is missing still, and why."""
        missing = {}
        for name in step.needed:
            if name in self.values:
                continue
            told = self.find(name, self.values.get("BUNDLE", ""))
            if told.value:
                self.values[name], self._found[name] = told.value, told.why
            else:
                missing[name] = told.why
        return missing

    def _note_bundle(self, said: str) -> None:
        """The first bundle that a step names is ``BUNDLE``, unless one was given; the newest other one is ``SECOND``."""
        for word in (word.rstrip(",.;:)") for word in re.findall(r"/[^\s\"']+", said)):
            if _is_bundle(Path(word)) and self.values.setdefault("BUNDLE", word) != word:
                self.values["SECOND"] = word


def _is_bundle(folder: Path) -> bool:
    """Not, too, where it cannot be told: somebody else's folder, a word too long for a path."""
    try:
        return (folder / "manifest.json").is_file()
    except OSError:
        return False


def no_value(step: Step, missing: Mapping[str, str]) -> str:
    """What somebody must give before a step can run, in words."""
    told = "; ".join(f"${name} has no value{f': {why}' if why else ''}" for name, why in missing.items())
    return f"{told}; give {' '.join(f'--with {name}=...' for name in missing)}, or leave the step out with --skip {step.name}"


def _last_words(said: str) -> list[str]:
    """The end of what a step said, without how long it waited for what."""
    return [line for line in said.strip().splitlines() if not _WAITS.search(line)][-_SHOWN_LINES:]


def _left(step: Step, outcome: str, why: str = "") -> StepRecord:
    return StepRecord(step.name, step.section, step.command, outcome, why=why)


@dataclass(frozen=True)
class Allowed:
    """Nobody is there to ask: what needs no approval runs, what needs one runs when its kind was approved, ``skip`` is left out.
    A step with a variable that has no value is held."""

    approvals: frozenset[str]
    skip: frozenset[str]
    by: str
    wait: Callable[[Step, str], Answered | None] = lambda step, command: None

    def decide(self, step: Step, command: str, missing: Mapping[str, str]) -> Decision:
        if step.name in self.skip:
            return Decision(Choice.skip, why="left out by --skip")
        if missing:
            return Decision(Choice.hold, why=no_value(step, missing))
        if not step.approval:
            return Decision(Choice.run, by="-")
        if step.approval in self.approvals:
            return Decision(Choice.run, by=f"{self.by} by --approve")
        told = self.wait(step, command)
        if told is None:
            return Decision(Choice.hold, why=f"needs approval: {step.approval}")
        if not told.granted:
            return Decision(Choice.hold, by=f"{told.by} by opsctl approve", why=f"{step.approval} was refused by {told.by}")
        return Decision(Choice.run, by=f"{told.by} by opsctl approve")


@dataclass(frozen=True)
class Asked:
    """A person at the terminal. ``ask`` puts a question and returns the line that was typed."""

    ask: Callable[[str], str]
    by: str
    approvals: Mapping[str, str]
    values: dict[str, str]

    def decide(self, step: Step, command: str, missing: Mapping[str, str]) -> Decision:
        for name, why in missing.items():
            given = self.ask(f"    ${name} ({f'{why}; ' if why else ''}empty: skip the step): ").strip()
            if not given:
                return Decision(Choice.skip, why=f"no value for ${name}")
            self.values[name] = given
        shown = ""
        if missing:
            command = shlex.join(commandline.filled(step.command, self.values))
            shown = f"    $ {command}\n"
        who = shown + f"  needs approval of {self.approvals[step.approval]}: running it says that you have it\n" if step.approval else shown
        while True:
            key = self.ask(f"{who}    [r]un, [s]kip, [e]dit or [q]uit, then Enter: ").strip().lower()[:1]
            if key == "r":
                return Decision(Choice.run, command=command if missing else "", by=f"{self.by} at the terminal" if step.approval else "-")
            if key == "s":
                return Decision(Choice.skip, why="skipped by hand")
            if key == "q":
                return Decision(Choice.quit, why="left here")
            if key == "e" and (edited := self.ask("    $ ").strip()):
                return Decision(Choice.run, command=edited, by=f"{self.by} at the terminal" if step.approval else "-")
