"""What a run of a runbook finds by itself for the variables of its steps, and what it does not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import fleet
from monitors.fleet import Deployment
from opsctl.playbooks.process import Ran
from opsctl.runbooks.document import Runbook, parse
from opsctl.runbooks.run import Allowed, Run, RunRecord
from opsctl.runbooks.values import Values

FLEET = """[deployment.flash]
engine = "lastbatch"
api = "http://127.0.0.1:9"
service = "{service}"
[[deployment.flash.node]]
name = "a"
[[deployment.flash.node.service]]
unit = "flash-a{suffix}"
ranks = [0]
log = "/dev/null"
command = ["true"]
[[deployment.flash.node]]
name = "b"
ssh = "ops@b"
[[deployment.flash.node.service]]
unit = "flash-b{suffix}"
ranks = [1]
log = "/dev/null"
command = ["true"]
"""
BOOK = parse(
    """---
class: hang_stopped
severity: page
summary: One process is stopped.
approvals: {continue: on-call}
fills: {PID: suspect pid, UNIT: suspect unit, HALF: half of max-running-requests}
---
## Evidence first
```sh {name=capture deadline=20s expects=0}
opsctl capture --fleet "$FLEET"
```
## Restore service
```sh {name=go-on deadline=10s expects=0 approval=continue}
kill -CONT "$PID"
```
```sh {name=thaw deadline=10s expects=0 approval=continue manager=systemd}
systemctl thaw "$UNIT"
```
""",
    "stopped.md",
)


def deployment(service: str = "embedded") -> Deployment:
    return fleet.parse(FLEET.format(service=service, suffix=".service" if service == "systemd" else ""), "fleet.toml").one()


def bundle(folder: Path, *suspects: str, verdict: str = "hang_stopped", end: str = "2126-01-01T00:00:00.000+00:00") -> str:
    folder.mkdir(parents=True)
    head = {"schema": "lastbatch.bundle/1", "items": [], "created_utc": end, "end": end, "verdict": verdict}
    (folder / "manifest.json").write_text(json.dumps(head))
    (folder / "verdict.json").write_text(json.dumps({"verdict": verdict, "suspects": suspects}))
    return str(folder)


@pytest.fixture(scope="module")
def suspect() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def carried_out(
    book: Runbook, values: dict[str, str], *, manager: str = "embedded", said: str = ""
) -> tuple[int, RunRecord, list[str], str]:
    """Every step agreed to, none carried out: exit status, record, the commands, the talk."""
    ran: list[str] = []
    talk: list[str] = []

    def execute(argv: list[str], deadline_s: float) -> Ran:
        ran.append(" ".join(argv))
        return Ran(0, said, 0.1)

    record = RunRecord("id", "stopped", "flash", "somebody", "now")
    agreed = Allowed(frozenset({"continue"}), frozenset(), "somebody")
    told = Values(book, deployment(manager))
    code = Run(book, agreed, execute, lambda _: None, talk.append, lambda: "now", {"FLEET": "f", **values}, told.find, manager).go(record)
    return int(code), record, ran, "\n".join(talk)


def test_the_pid_comes_from_the_suspect_of_a_bundle_that_a_step_took_and_it_is_said_so(
    tmp_path: Path, suspect: subprocess.Popen[bytes]
) -> None:
    text = f"rank 0 (pid {suspect.pid}, node a): in state T"
    made = bundle(tmp_path / "b", text)
    code, record, ran, talk = carried_out(BOOK, {}, said=f"bundle {made}, 29 items\n")
    assert code == 0 and ran[1] == f"kill -CONT {suspect.pid}"
    assert record.steps[1].filled == {"PID": f"the suspect of the bundle's verdict: {text}"}
    assert f"$PID is the suspect of the bundle's verdict: {text}" in talk


def test_a_step_for_another_service_manager_is_left_out_and_said_so(tmp_path: Path, suspect: subprocess.Popen[bytes]) -> None:
    made = bundle(tmp_path / "b", f"rank 0 (pid {suspect.pid}, node a): in state T")
    _, record, ran, _ = carried_out(BOOK, {"BUNDLE": made})
    assert record.steps[2].outcome == "skipped" and len(ran) == 2
    assert record.steps[2].why == "only for services under systemd; these are under embedded"
    code, _, ran, _ = carried_out(BOOK, {"BUNDLE": made}, manager="systemd")
    assert code == 0 and ran[2] == "systemctl thaw flash-a.service"


@pytest.mark.parametrize(
    ("suspects", "more", "says"),
    [
        (["rank 1 (pid {pid}, node b): in state T"], {}, "the suspect is on node b: do it there (ssh ops@b)"),
        (["rank 1 (pid {pid}): in state T"], {}, "the suspect is on node b"),
        (["rank 0 (pid {pid}, node a): x", "rank 0 (pid 4, node a): y"], {}, "does not name one suspect process: rank 0"),
        (["the cgroup is frozen"], {}, "does not name one suspect process: the cgroup is frozen"),
        (["rank 0 (pid 999999999, node a): in state T"], {}, "the suspect is gone"),
        (["rank 0 (pid {pid}, node z): in state T"], {}, "the fleet file has no node of this suspect"),
        (["rank 0 (pid {pid}, node a): in state T"], {"end": "2001-01-01T00:00:00.000+00:00"}, "is another process by now"),
        (["rank 0 (pid {pid}, node a): x"], {"verdict": "crash"}, "the bundle's verdict is crash, and this runbook is for hang_stopped"),
    ],
)
def test_no_process_is_named_that_may_be_another(
    tmp_path: Path, suspect: subprocess.Popen[bytes], suspects: list[str], more: dict[str, Any], says: str
) -> None:
    made = bundle(tmp_path / "b", *(text.format(pid=suspect.pid) for text in suspects), **more)
    found = Values(BOOK, deployment()).find("PID", made)
    assert not found.value and says in found.why
    code, record, ran, _ = carried_out(BOOK, {"BUNDLE": made})
    assert code == 5 and len(ran) == 1, "what follows leans on it"
    assert record.steps[1].outcome == "held" and says in record.steps[1].why and "--with PID=..." in record.steps[1].why


def test_half_of_a_setting_is_half_of_what_the_server_said_it_runs_with(tmp_path: Path) -> None:
    made = bundle(tmp_path / "b")
    told = Values(BOOK, deployment())
    assert "says what max-running-requests is" in told.find("HALF", made).why
    (tmp_path / "b" / "server_info.json").write_text(json.dumps({"config": {"scheduler": {"max_running_requests": 32}}}))
    assert told.find("HALF", made).value == "16"


def test_what_only_a_capture_will_tell_waits_for_it_and_what_it_will_not_is_known_at_once(tmp_path: Path) -> None:
    told = Values(BOOK, deployment())
    assert list(told.without(BOOK.steps, {"FLEET": "f"}, "")) == []
    assert [step.name for step, _ in told.without(BOOK.steps[1:], {"FLEET": "f"}, "")] == ["go-on", "thaw"]
    made = bundle(tmp_path / "b", "rank 1 (pid 1, node b): in state T")
    assert [step.name for step, _ in told.without(BOOK.steps, {"FLEET": "f"}, made)] == ["go-on", "thaw"]


def test_a_variable_with_a_default_needs_no_value() -> None:
    book = parse(BOOK.text.replace('"$PID"', '"${PID:-1}"'), "stopped.md")
    assert book.steps[1].variables == ("PID",) and book.steps[1].needed == ()
