"""Runbooks as commands: read, checked, gone through with what nobody agreed to left undone."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsctl import cli
from opsctl.approvals import Answered, Approvals
from opsctl.playbooks.process import Ran
from opsctl.runbooks.document import parse
from opsctl.runbooks.run import Allowed, Run, RunRecord

FLEET = """[deployment.flash]
engine = "lastbatch"
api = "http://127.0.0.1:9"
service = "embedded"
[[deployment.flash.node]]
name = "a"
[[deployment.flash.node.service]]
unit = "flash"
ranks = [0]
log = "/dev/null"
command = ["true"]
"""
BOOK = """---
class: hang_stopped
severity: page
summary: One process is stopped.
approvals:
  continue: on-call
---

# Stopped
The process is $PID.

## Evidence first
```sh {{name=look deadline=20s expects=0}}
opsctl runbook list --fleet "$FLEET"
```

## Restore service
```sh {{name=go-on deadline=10s expects=0 approval=continue}}
kill -{signal} "$PID"
```

## Confirm
```sh {{name=confirm deadline=20s expects=0}}
opsctl version
```
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "runbooks").mkdir()
    (tmp_path / "runbooks" / "stopped.md").write_text(BOOK.format(signal="TERM"))
    yield tmp_path


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def opsctl(site: Path, *words: str, typed: str | None = None) -> tuple[int, Any, str]:
    out, err = io.StringIO(), io.StringIO()
    env = {**os.environ, "XDG_STATE_HOME": str(site / "state")}
    stdin = io.StringIO() if typed is None else Terminal(typed)
    code = cli.main([*words, "--fleet", str(site / "fleet.toml"), "--json"], env, stdin=stdin, stdout=out, stderr=err)
    return code, json.loads(out.getvalue()), err.getvalue()


def test_without_an_approval_what_needs_it_is_left_undone_and_so_is_what_follows(site: Path, victim: subprocess.Popen[bytes]) -> None:
    code, answer, _ = opsctl(site, "runbook", "run", "stopped", "--yes", "--with", f"PID={victim.pid}")
    assert code == 5
    assert [step["outcome"] for step in answer["data"]["steps"]] == ["passed", "held"]
    assert victim.poll() is None


def test_with_the_approval_every_step_runs_and_the_record_is_kept_beside_the_bundle(site: Path, victim: subprocess.Popen[bytes]) -> None:
    (site / "bundle").mkdir()
    code, answer, err = opsctl(site, "runbook", "run", "stopped", "--yes", "--with", f"PID={victim.pid}", "--approve", "continue",
                               "--bundle", str(site / "bundle"))  # fmt: skip
    assert code == 0, err
    assert victim.wait(10) == -15
    data = answer["data"]
    assert data["outcome"] == "done" and data["fidelity"] == 1.0
    assert data["steps"][1]["approved_by"].endswith("by --approve")
    kept = json.loads(next((site / "bundle").glob("runbook-*.json")).read_text())
    assert kept["steps"] == data["steps"] == json.loads(Path(data["record"]).read_text())["steps"]


def test_a_step_whose_variable_nothing_can_tell_is_refused_by_name_before_the_first_is_run(site: Path) -> None:
    code, answer, _ = opsctl(site, "runbook", "run", "stopped", "--yes", "--approve", "continue")
    assert code == 2 and answer["data"] is None
    said = answer["errors"][0]["message"]
    assert "go-on: $PID has no value" in said and "--with PID=..." in said and "--skip go-on" in said
    code, answer, _ = opsctl(site, "runbook", "run", "stopped", "--yes", "--approve", "continue", "--skip", "go-on")
    assert code == 0 and [step["outcome"] for step in answer["data"]["steps"]] == ["passed", "skipped", "passed"]


def test_a_step_that_goes_wrong_ends_the_run(site: Path) -> None:
    code, answer, _ = opsctl(site, "runbook", "run", "stopped", "--yes", "--approve", "continue", "--with", "PID=999999999")
    assert code == 9
    assert [step["outcome"] for step in answer["data"]["steps"]] == ["passed", "failed"]
    assert "exit code 1" in answer["errors"][0]["message"]


def test_at_a_terminal_keys_run_edit_skip_and_leave(site: Path, victim: subprocess.Popen[bytes]) -> None:
    typed = f"r\n{victim.pid}\ne\nkill -0 {victim.pid}\nq\n"
    code, answer, err = opsctl(site, "runbook", "run", "stopped", typed=typed)
    assert code == 130
    assert [step["outcome"] for step in answer["data"]["steps"]] == ["passed", "passed", "left"]
    assert answer["data"]["steps"][1]["edited"] and answer["data"]["fidelity"] == 0.5
    assert "needs approval of on-call" in err
    assert victim.poll() is None


def test_at_a_terminal_the_runbooks_own_words_and_what_each_step_says_are_shown(site: Path) -> None:
    path = site / "runbooks" / "stopped.md"
    path.write_text(path.read_text().replace("```sh {name=go-on", "Only if it is still stopped:\n\n```sh {name=go-on", 1))
    code, _, err = opsctl(site, "runbook", "run", "stopped", typed="r\n\nr\n")
    assert code == 0, err
    assert err.index("Only if it is still stopped:") < err.index(": go-on") and "    | stopped " in err
    _, _, err = opsctl(site, "runbook", "run", "stopped", "--yes", "--skip", "go-on")
    assert "Only if" not in err and "    | " not in err


def test_a_command_with_a_value_that_was_typed_is_shown_before_it_is_agreed_to(site: Path, victim: subprocess.Popen[bytes]) -> None:
    _, _, err = opsctl(site, "runbook", "run", "stopped", typed=f"r\n{victim.pid}\nq\n")
    assert err.rindex(f"$ kill -TERM {victim.pid}\n") < err.rindex("[r]un") and victim.poll() is None


def test_keys_pressed_while_a_step_runs_answer_no_later_question(site: Path, victim: subprocess.Popen[bytes]) -> None:
    """On a terminal of the system's: somebody impatient presses r twice, and what is asked next needs approval."""
    ours, its = pty.openpty()
    env = {**os.environ, "XDG_STATE_HOME": str(site / "state")}
    words = [sys.executable, "-m", "opsctl.cli", "runbook", "run", "stopped", "--fleet", str(site / "fleet.toml"), "--with",
             f"PID={victim.pid}"]  # fmt: skip
    with subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=env, start_new_session=True) as opsctl_there:
        os.close(its)
        try:
            said = _until(ours, b"then Enter: ")
            os.write(ours, b"r\nr\n")
            said += _until(ours, b"then Enter: ")
            assert b"go-on" in said and victim.poll() is None
            os.write(ours, b"q\n")
            assert opsctl_there.wait(20) == 130 and victim.poll() is None
        finally:
            opsctl_there.kill()
            os.close(ours)


def _until(terminal: int, end: bytes) -> bytes:
    said, until = b"", time.monotonic() + 20
    while not said.endswith(end):
        assert time.monotonic() < until, said
        if select.select([terminal], [], [], 0.2)[0]:
            said += os.read(terminal, 65_536)
    return said


def test_an_edited_command_that_is_none_fails_its_step_and_says_why(site: Path, victim: subprocess.Popen[bytes]) -> None:
    code, answer, _ = opsctl(site, "runbook", "run", "stopped", typed='e\necho "open\n')
    assert code == 9 and answer["data"]["steps"][0]["outcome"] == "failed"
    assert "No closing quotation" in answer["data"]["steps"][0]["why"]


def test_an_approval_from_another_terminal_lets_the_step_go_on(site: Path, victim: subprocess.Popen[bytes]) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(site / "state")}
    given: list[str] = []

    def agree() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for one in Approvals(env).waiting():
                assert f"kill -TERM {victim.pid}" in one.what
                out = io.StringIO()
                assert cli.main(["approve", one.id], env, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 0
                given.append(out.getvalue())
                return
            time.sleep(0.05)

    other = threading.Thread(target=agree)
    other.start()
    code, answer, err = opsctl(site, "runbook", "run", "stopped", "--yes", "--with", f"PID={victim.pid}", "--approval-wait-s", "20")
    other.join()
    assert code == 0, err
    assert given and answer["data"]["steps"][1]["approved_by"].endswith("by opsctl approve")
    assert victim.wait(10) == -15
    assert not Approvals(env).waiting()


def test_a_refusal_is_told_as_one_and_by_whom() -> None:
    book = parse(BOOK.format(signal="TERM"), "stopped.md")
    record = RunRecord("id", "stopped", "flash", "somebody", "now")
    asked = Allowed(frozenset(), frozenset(), "somebody", lambda step, command: Answered(False, "ana"))
    code = Run(book, asked, lambda argv, deadline_s: Ran(0, "", 0.1), lambda record: None, lambda text: None, lambda: "now",
               {"FLEET": "fleet.toml", "PID": "1"}).go(record)  # fmt: skip
    assert code == 5 and record.steps[1].why == "continue was refused by ana" and record.steps[1].answered_by == "ana by opsctl approve"


def test_what_does_not_wait_cannot_be_approved(site: Path) -> None:
    out = io.StringIO()
    env = {**os.environ, "XDG_STATE_HOME": str(site / "state")}
    assert cli.main(["approve", "abc123", "--json"], env, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 2
    assert "nothing waits" in out.getvalue()


def test_a_request_of_somebody_who_was_killed_or_of_another_form_waits_for_nothing_and_is_swept(tmp_path: Path) -> None:
    folder = tmp_path / "lastbatch" / "approvals"
    folder.mkdir(parents=True)
    good = {"id": "abcdef", "deployment": "d", "kind": "k", "what": "w", "asked_by": "a", "pid": os.getpid(), "pid_started": "1",
            "until_unix_s": time.time() + 60}  # fmt: skip
    odd = ({"pid": -1, "pid_started": ""}, {"until_unix_s": 1e308}, {"id": "../x"}, {})
    for number, more in enumerate(odd):
        (folder / f"{number}.json").write_text(json.dumps({**good, **more}))
    (folder / "deep.json").write_text("[" * 100_000)
    approvals = Approvals({"XDG_STATE_HOME": str(tmp_path)})
    assert approvals.waiting() == []
    assert approvals.ask("d", "k", "w", 0.01, lambda text: None) is None
    assert not (folder / "3.json").exists() and not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("opsctl version", "opsctl verzion", ':24: confirm: opsctl verzion: no such command; did you mean "opsctl version"?'),
        ("expects=0 approval=continue", "expects=77 approval=continue", ":18: go-on: expects: an exit code"),
        ("approval=continue", "approval=boss", ":18: go-on: approval boss is not in the front matter, which has continue"),
        ("approval=continue", "", ":18: go-on: it ends or changes something, so somebody must agree"),
        ("deadline=10s", "deadline=10", ":18: go-on: deadline: seconds"),
        ("name=confirm", "name=look", ":23: a second step is called look"),
        ("The process is $PID.", "", ":19: go-on: $PID is named nowhere in the text"),
        ("class: hang_stopped", "class: hang_sideways", ":2: class: hang_sideways is no class of verdict"),
        ("opsctl version\n```", "opsctl version\n", ":23: the fence is not closed"),
        ("approvals:", "fills: {PID: suspekt pid}\napprovals:", ":2: fills: PID: 'suspekt pid' says not where"),
        ("approvals:", "fills: {RANK: suspect pid}\napprovals:", ":2: fills: RANK: no step uses it"),
        ("approval=continue", "approval=continue manager=upstart", ":18: go-on: manager: upstart runs no service; there are systemd"),
        ('kill -TERM "$PID"', "systemctl thaw a.service", ":18: go-on: systemctl is for services that systemd runs: manager=systemd"),
        ("severity: page\n", "", ":2: front matter: severity is missing"),
    ],
)
def test_what_is_wrong_is_said_by_file_and_line(site: Path, old: str, new: str, says: str) -> None:
    path = site / "runbooks" / "stopped.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    code, answer, _ = opsctl(site, "runbook", "lint", "stopped")
    found = [f"{error['where']}: {error['message']}" for error in answer["errors"]]
    assert code == 2 and any(says in one for one in found), found
    assert opsctl(site, "runbook", "run", "stopped", "--yes")[0] == 2


def test_all_that_ship_can_be_run(site: Path) -> None:
    code, answer, _ = opsctl(site, "runbook", "lint")
    assert code == 0, answer["errors"]
    assert len(answer["data"]["files"]) > 18


def test_bundles_that_captures_name_fill_the_variables_of_the_steps_behind_them(tmp_path: Path) -> None:
    """As ``opsctl capture`` says it: the path in a sentence."""
    text = BOOK.replace("opsctl runbook list --fleet", "opsctl capture --fleet").replace(
        "opsctl version", 'opsctl bundle diff "$BUNDLE" "$SECOND"'
    )
    book = parse(text.format(signal="TERM").replace(" approval=continue", "").replace('"$PID"', "1"), "stopped.md")
    taken = iter(("first", "second"))
    ran: list[list[str]] = []

    def execute(argv: list[str], deadline_s: float) -> Ran:
        ran.append(argv)
        name = next(taken, "")
        if name:
            (tmp_path / name).mkdir()
            (tmp_path / name / "manifest.json").write_text("{}")
        return Ran(0, f"hang_stopped (confidence 0.90)\nbundle {tmp_path}/{name}, 29 items in 5.8 s\n", 0.1)

    nobody = Allowed(frozenset(), frozenset(), "somebody")
    Run(book, nobody, execute, lambda record: None, lambda text: None, lambda: "now", {"FLEET": "fleet.toml"}).go(
        RunRecord("id", "stopped", "flash", "somebody", "now"))  # fmt: skip
    assert ran[-1][-2:] == [f"{tmp_path}/first", f"{tmp_path}/second"]


def test_a_full_disk_an_odd_word_or_a_step_that_cannot_begin_does_not_break_a_run_off() -> None:
    book = parse(BOOK.format(signal="TERM").replace(" approval=continue", ""), "stopped.md")
    record = RunRecord("id", "stopped", "flash", "somebody", "now")
    said = iter((f"bundle /{'x' * 300}, see /\udcff", "token=1"))

    def execute(argv: list[str], deadline_s: float) -> Ran:
        if (word := next(said, None)) is None:
            raise FileNotFoundError(2, "No usable temporary directory found")
        return Ran(0, word, 0.1)

    def full(record: RunRecord) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    run = Run(book, Allowed(frozenset(), frozenset(), "somebody"), execute, full, told.append, lambda: "now",
              {"FLEET": "x?api_key=not-for-anyone", "PID": "1"})  # fmt: skip
    assert run.go(record) == 9 and [step.outcome for step in record.steps] == ["passed", "passed", "failed"]
    assert "No usable temporary directory" in record.steps[2].why
    assert "No space left" in run.lost and len([line for line in told if "the record cannot be written" in line]) == 1
    assert "not-for-anyone" not in str(record)
