"""Playbooks carried out on a real deployment of the contract server, and their steps as real processes."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors.exit_codes import ExitCode
from opsctl import cli
from opsctl.approvals import Approvals
from opsctl.playbooks.actions import Place
from opsctl.playbooks.journal import Record, StepResult, keeper
from opsctl.playbooks.process import end_in
from opsctl.playbooks.run import Hands
from opsctl.playbooks.run import run as carry_out
from opsctl.playbooks.schema import Expectation, Playbook, Step
from opsctl.playbooks.tolerances import tolerated
from opsctl.rollout.checks import Check, failed, passed
from opsctl.rollout.result import Page
from opsctl.service.embedded import EmbeddedService
from tests.opsctl.site import ROOT, Ran, Site, wait_until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    made.start()
    yield made
    made.close()


def playbook(site: Site, *words: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    where = ["--fleet", str(site.folder / "fleet.toml"), "--deployment", "d", "--json"]
    code = cli.main(["playbook", *words, *where], site.env, stdin=io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


def own_playbook(site: Site, name: str, method: str, rollbacks: str = "") -> None:
    (site.folder / "playbooks").mkdir(exist_ok=True)
    (site.folder / "playbooks" / f"{name}.yaml").write_text(
        f"name: {name}\nkind: response\nsummary: x\nhypothesis: [{{probe: health}}]\nmethod: [{method}]\nrollbacks: [{rollbacks}]\n"
    )


def test_a_plan_shows_commands_and_approvals_and_touches_nothing(site: Site) -> None:
    before = site.running
    planned = playbook(site, "plan", "refuse-grammar-at-admission")
    assert planned.code == 0, planned.err
    (step,) = planned.data["method"]
    assert step["told"].startswith("opsctl rollout apply --fleet ") and "--set grammar-backend=none" in step["told"]
    assert planned.data["approvals"] == ["change-configuration"] and site.running == before


def test_what_is_needed_and_not_there_is_said_and_nothing_is_touched(site: Site) -> None:
    ran = playbook(site, "run", "plain-restart-prefill-decode", "--yes", "--approve", "restart")
    assert ran.code == 2
    assert [error["message"] for error in ran.errors] == [
        "needs role prefill: d has no service of this role, only both", "needs role decode: d has no service of this role, only both",
    ]  # fmt: skip
    assert playbook(site, "plan", "disable-speculation-above-batch").data["unmet"]


def test_off_a_terminal_it_is_not_run_without_yes(site: Site) -> None:
    ran = playbook(site, "run", "respond-to-wedge")
    assert ran.code == 2 and ran.errors[0]["code"] == "unattended"


def test_a_response_captures_and_pages_and_holds_the_restart_until_somebody_agrees(site: Site) -> None:
    invocation = site.services[0].snapshot().invocation_id
    held = playbook(site, "run", "respond-to-wedge", "--yes", "--incident")
    assert held.code == ExitCode.HELD, held.out
    assert [(step["name"], step["outcome"]) for step in held.data["method"]] == [
        ("capture", "passed"),
        ("tell", "passed"),
        ("restart", "held"),
    ]
    assert held.data["page_sent"] is True and any("wedged" in page["message"] for page in site.pages.got)
    assert site.services[0].snapshot().invocation_id == invocation
    assert json.loads(Path(held.data["record"]).read_text())["why"] == "restart: needs approval: give it with --approve restart"


def test_a_response_is_not_begun_while_all_is_well_and_nobody_says_that_it_is_not(site: Site) -> None:
    told = len(site.pages.got)
    ran = playbook(site, "run", "respond-to-wedge", "--yes", "--approve", "restart")
    assert ran.code == ExitCode.USAGE and ran.data["outcome"] == "not begun" and "--incident" in ran.errors[0]["message"]
    assert ran.data["method"] == [] and len(site.pages.got) == told


def test_a_step_waits_for_an_approval_from_another_terminal(site: Site) -> None:
    own_playbook(site, "asks", "{name: restart, run: opsctl version, deadline_s: 20, approval: restart}")
    asked: list[str] = []

    def agree() -> None:
        wait_until(lambda: Approvals(site.env).waiting(), 20)
        (one,) = Approvals(site.env).waiting()
        asked.append(one.of)
        Approvals(site.env).answer(one.id, granted=True)

    other = threading.Thread(target=agree)
    other.start()
    ran = playbook(site, "run", "asks", "--yes", "--approval-wait-s", "60")
    other.join()
    assert ran.code == 0, ran.out
    assert asked == ["playbook asks, step restart"] and ran.data["method"][0]["approved_by"].endswith("by opsctl approve")


def test_a_playbook_is_shown_as_it_stands(site: Site) -> None:
    out = io.StringIO()
    assert (
        cli.main(["playbook", "show", "respond-to-wedge", "--json"], site.env, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 0
    )
    shown = json.loads(out.getvalue())["data"]
    assert shown["text"].startswith("#") and shown["playbook"]["kind"] == "response" and shown["path"].endswith("respond-to-wedge.yaml")


def test_the_fleet_file_agrees_to_the_playbook_that_its_on_wedge_names(site: Site) -> None:
    invocation = site.services[0].snapshot().invocation_id
    own_playbook(
        site, "only-restart", "{name: restart, run: opsctl service restart-group --fleet $FLEET, deadline_s: 60, approval: restart}"
    )
    text = (site.folder / "fleet.toml").read_text()
    try:
        (site.folder / "fleet.toml").write_text(f"{text}[deployment.d.on_wedge]\naction = 'playbook'\nplaybook = 'only-restart'\n")
        ran = playbook(site, "run", "only-restart", "--yes")
    finally:
        (site.folder / "fleet.toml").write_text(text)
    assert ran.code == 0, ran.out + ran.err
    assert ran.data["method"][0]["approved_by"].endswith("fleet.toml: deployment.d.on_wedge")
    assert ran.data["after"][0]["outcome"] == "passed"
    assert site.services[0].snapshot().invocation_id not in ("", invocation)


def test_a_rollout_playbook_changes_the_flag_and_what_must_hold_is_measured(site: Site) -> None:
    assert site.rollout("verify").code == 0
    ran = playbook(site, "run", "refuse-grammar-at-admission", "--yes", "--approve", "change-configuration", "--reason", "a test")
    assert ran.code == 0, ran.out + ran.err
    assert "none" in site.running[0]
    assert {check["name"]: check["outcome"] for check in ran.data["after"]} == {
        "answer": "passed", "one_configuration": "passed", "setting": "passed", "refusal": "passed",
    }  # fmt: skip
    assert ran.data["outcome"] == "done" and ran.data["reason"] == "a test" and ran.data["document"]["kind"] == "rollout"


def test_sigterm_ends_the_step_runs_the_rollbacks_and_leaves_with_130(site: Site) -> None:
    services = site.folder / "services"
    (services / "sleeper.toml").write_text("argv = ['sleep', '300']\n")
    own_playbook(site, "long", f"{{name: wait, run: opsctl service run sleeper --services {services}, deadline_s: 60}}",
                 f"{{name: undo, run: opsctl service status node0 --services {services}, deadline_s: 20}}")  # fmt: skip
    sleeper = EmbeddedService(services, "sleeper", site.env)
    words = ["playbook", "run", "long", "--yes", "--json", "--fleet", str(site.folder / "fleet.toml")]
    process = subprocess.Popen([sys.executable, "-m", "opsctl.cli", *words], cwd=ROOT, env=site.env, text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        wait_until(lambda: sleeper.snapshot().main_pid, 20, "the step's process")
        pid = sleeper.snapshot().main_pid
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    data = json.loads(out)["data"]
    assert data["outcome"] == "interrupted" and data["rollbacks"][0]["outcome"] == "passed"
    assert data["after"][0]["outcome"] == "passed"
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10, "the end of what the step started")


# The steps themselves.


class Watched:
    """The deployment's side of a run: probes answer as they are told to, and what is done to it is written down."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.done: list[str] = []
        self.given_s: list[float] = []

    def check(self, one: Expectation) -> Check:
        self.given_s.append(tolerated(one)["within_s"])
        good = self.answers.pop(0) if self.answers else True
        return passed(one.probe, "well") if good else failed(one.probe, "not well")

    def arm(self, spec: str, deadline_s: float) -> None:
        if spec == "no.such":
            raise OSError("POST /admin/faults: HTTP 400")
        self.done.append(spec)

    def lift(self) -> str:
        self.done.append("lifted")
        return ""

    def page(self, title: str, body: str, key: str) -> Page:
        return Page(False, "nobody to tell")


def step(name: str, code: str = "pass", **more: Any) -> Step:
    return Step(name=name, run="" if "fault" in more or "page" in more else f'python3 -c "{code}"', **{"deadline_s": 20, **more})


def outcome_of(server: Watched, kind: str, method: list[Step], rollbacks: list[Step] | None = None,
               agree: Callable[[Step, str], str] = lambda step, told: "",
               keep: Callable[[Record], None] = lambda record: None) -> tuple[ExitCode, Record]:  # fmt: skip
    needs = [{"faults": "allowed"}] if any(one.fault for one in method) else []
    made = Playbook.model_validate({"name": "t", "kind": kind, "summary": "t", "needs": needs, "hypothesis": [{"probe": "answer"}],
                                    "method": method, "rollbacks": rollbacks or []})  # fmt: skip
    record = Record("1", "t", kind, "d", "me", "", "now", {})
    hands = Hands(server, agree, keep, lambda text: None, grace_s=1.0)
    return carry_out(made, Place("f", "d"), hands, record), record


def test_an_experiment_is_not_begun_when_what_must_hold_does_not() -> None:
    code, record = outcome_of(Watched(False), "experiment", [step("a")])
    assert (code, record.outcome, record.method) == (ExitCode.FOUND, "not begun", [])


def test_what_is_only_told_before_a_response_does_not_hold_it_up() -> None:
    server = Watched(False)
    assert outcome_of(server, "response", [step("a")])[0] is ExitCode.DONE
    assert server.given_s == [5.0, 60.0]
    server = Watched()
    outcome_of(server, "experiment", [step("a")])
    assert server.given_s == [60.0, 60.0]


def test_after_a_failure_later_steps_are_skipped_and_every_rollback_runs() -> None:
    rollbacks = [step("always"), step("sorry", when="failed")]
    code, record = outcome_of(Watched(), "experiment", [step("a"), step("b", "raise SystemExit(7)"), step("c")], rollbacks)
    assert (code, record.outcome) == (ExitCode.UNREACHABLE, "failed"), "the step's own exit code says more than that it failed"
    assert [one.outcome for one in record.method] == ["passed", "failed", "skipped"]
    assert [one.outcome for one in record.rollbacks] == ["passed", "passed"]
    code, record = outcome_of(Watched(), "experiment", [step("a"), step("b", "raise SystemExit(8)")], rollbacks)
    assert (code, record.outcome) == (ExitCode.REVERTED, "rolled back")


def test_after_a_success_only_the_rollbacks_that_always_run_do() -> None:
    code, record = outcome_of(Watched(), "experiment", [step("a", "raise SystemExit(9)", expects=9)], [step("x"), step("y", when="failed")])
    assert (code, record.outcome) == (ExitCode.DONE, "done")
    assert [one.outcome for one in record.rollbacks] == ["passed", "skipped"]


def test_a_failed_rollback_is_stuck_and_the_next_one_runs_all_the_same() -> None:
    code, record = outcome_of(Watched(), "experiment", [step("a")], [step("x", "raise SystemExit(1)"), step("y")])
    assert (code, record.outcome) == (ExitCode.STUCK, "stuck")
    assert [one.outcome for one in record.rollbacks] == ["failed", "passed"]


def test_a_success_whose_steady_state_is_lost_is_a_failure() -> None:
    code, record = outcome_of(Watched(True, False), "response", [step("a")])
    assert (code, record.why) == (ExitCode.FOUND, "what must hold does not: answer failed: not well")


def test_faults_are_lifted_whatever_happens() -> None:
    server = Watched()
    code, record = outcome_of(server, "experiment", [step("arm", fault="decode.slow"), step("b", "raise SystemExit(1)")])
    assert server.done == ["decode.slow", "lifted"] and code is ExitCode.REVERTED and record.rollbacks[0].name == "lift-faults"
    server = Watched()
    outcome_of(server, "experiment", [step("arm", fault="no.such")])
    assert server.done == ["lifted"], "a fault that was refused may still have been taken"


def test_a_record_that_can_no_longer_be_written_ends_nothing_that_has_begun() -> None:
    kept = iter(range(1))

    def keep(record: Record) -> None:
        if next(kept, None) is None:
            raise OSError(28, "No space left on device")

    server = Watched()
    code, record = outcome_of(server, "experiment", [step("arm", fault="decode.slow"), step("b")], [step("undo")], keep=keep)
    assert server.done == ["decode.slow", "lifted"] and [one.outcome for one in record.method] == ["passed", "passed"]
    assert [one.outcome for one in record.rollbacks] == ["passed", "passed"]
    assert code is ExitCode.INTERNAL and "No space left" in record.why


def test_whatever_breaks_in_the_midst_what_was_done_is_undone() -> None:
    def gone(step: Step, told: str) -> str:
        raise RuntimeError("the terminal is gone")

    server = Watched()
    code, record = outcome_of(server, "experiment", [step("arm", fault="decode.slow"), step("b", approval="restart")], [step("undo")], gone)
    assert server.done == ["decode.slow", "lifted"] and [one.name for one in record.rollbacks] == ["lift-faults", "undo"]
    assert code is ExitCode.INTERNAL and (record.outcome, record.why) == ("failed", "RuntimeError: the terminal is gone")


def test_a_record_keeps_no_secret(tmp_path: Path) -> None:
    document = {"method": [{"rollout": {"env": {"HF_TOKEN": "not-for-anyone"}}}]}
    done = StepResult(
        "a", "rollout", "opsctl rollout apply --env HF_TOKEN=not-for-anyone", "passed", said="api_key=not-for-anyone\nand more"
    )
    keeper(tmp_path)(Record("1", "t", "response", "d", "me", "", "now", document, method=[done]))
    text = (tmp_path / "1.json").read_text()
    assert "not-for-anyone" not in text and "and more" in text and json.loads(text)["method"][0]["name"] == "a"


def test_a_page_that_does_not_go_out_holds_nothing_up_and_is_told() -> None:
    code, record = outcome_of(Watched(), "response", [step("tell", page="hello"), step("b")])
    assert code is ExitCode.INTERNAL and record.page_sent is False
    assert [one.outcome for one in record.method] == ["failed", "passed"]


def test_a_command_ends_at_its_deadline_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import subprocess, pathlib; p = subprocess.Popen(['sleep', '60']); pathlib.Path('{mark}').write_text(str(p.pid)); p.wait()"
    begun = time.monotonic()
    ran = end_in([sys.executable, "-c", code], 1.0, grace_s=5.0)
    assert ran.code is None and ran.ending == "not done after 1 s, and ended" and time.monotonic() - begun < 8
    wait_until(lambda: not Path(f"/proc/{mark.read_text()}").exists(), 5, "the end of what it started")
    assert end_in(["/no/such"], 1.0).ending == "/no/such: No such file or directory"
    assert end_in([sys.executable, "-c", "print(1); import os; os.kill(os.getpid(), 9)"], 10.0).ending == "signal 9"
