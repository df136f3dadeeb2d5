"""Rollouts of a real HTTP process under the embedded supervisor, each outcome on its road."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opsctl.rollout import journal
from opsctl.service.manager import State
from tests.opsctl.site import Site, wait_until

MakeSite = Callable[..., Site]
BASIC = ("boot", "argv", "ranks", "completion", "log")


def outcomes(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in checks}


def test_a_good_change_is_proven_and_committed_and_survives_the_next_restart(make_site: MakeSite) -> None:
    site = make_site(nodes=2)
    assert site.ask(response_format={"type": "json_object"}).status_code == 200
    ran = site.apply("--set", "grammar-backend=none", "--reason", "the incident of tonight")
    assert ran.code == 0, ran.err
    assert ran.data["state"] == "committed"
    looked_at = (*BASIC, "drift", "streaming", "long context", "concurrent", "tool call", "json", "steady")
    assert outcomes(ran.data["checks"]) == dict.fromkeys(looked_at, "passed")
    assert ran.data["page_sent"] is None
    assert site.pages.got == []
    assert site.ask(response_format={"type": "json_object"}).status_code == 400
    assert all(args[-2:] == ["--grammar-backend", "none"] for args in site.running)
    for service in site.services:
        change = service.read_change()
        assert change.trial is None and change.committed is not None and service.lease_token() == ""
        first = service.snapshot().invocation_id
        service.begin_stop()
        service.begin_start()
        wait_until(
            lambda service=service, first=first: service.snapshot().state is State.active and service.snapshot().invocation_id != first
        )
    assert all(args[-2:] == ["--grammar-backend", "none"] for args in site.running)
    history = site.rollout("history").data
    assert [(r["state"], r["reason"]) for r in history] == [("committed", "the incident of tonight")]


def test_an_unknown_flag_is_refused_by_the_installed_build_before_anything_is_touched(make_site: MakeSite) -> None:
    site = make_site()
    before = site.services[0].snapshot()
    ran = site.apply("--set", "grammar-backnd=none")
    assert ran.code == 2
    assert "grammar-backnd" in ran.errors[0]["message"]
    assert site.services[0].snapshot() == before
    assert site.services[0].read_change().trial is None


def test_a_crash_at_the_first_decode_is_known_within_two_seconds_with_its_whole_traceback_and_reverted(make_site: MakeSite) -> None:
    site = make_site(nodes=2, args=["--crash-sequential"])
    ran = site.apply("--set", "disable-overlap-schedule")
    assert ran.code == 3, ran.err
    crash = next(check for check in ran.data["checks"] if check["outcome"] == "failed")
    assert crash["name"] == "completion"
    trace = crash["data"]["tracebacks"][0]
    assert trace.startswith("Traceback (most recent call last):")
    assert trace.endswith("TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'")
    moments = ran.data["moments"]
    assert moments["failure known"] - moments["group started"] < 2.5  # one boot and at most 2 s
    assert outcomes(ran.data["revert_checks"]) == dict.fromkeys(BASIC, "passed")
    assert ran.data["page_sent"] is True
    assert "reverted" in site.pages.got[0]["title"]
    assert site.ask().status_code == 200
    assert all("--disable-overlap-schedule" not in args for args in site.running)
    assert [s.read_change().trial for s in site.services] == [None, None]


def test_a_start_that_dies_at_boot_is_reverted_after_its_first_exit_not_after_the_deadline(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", "fail-at-boot", "--boot-deadline-s", "60")
    assert ran.code == 3, ran.err
    boot = ran.data["checks"][0]
    assert (boot["name"], boot["outcome"]) == ("boot", "failed")
    assert boot["data"]["tracebacks"][0].endswith("RuntimeError: the weights do not fit")
    assert ran.data["moments"]["failure known"] - ran.data["moments"]["group started"] < 2.5


def test_a_boot_that_never_ends_is_reverted_at_its_deadline_and_says_so_while_it_waits(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", "never-ready", "--boot-deadline-s", "1.5")
    assert ran.code == 3, ran.err
    assert "boot: not within 1.5 s" in ran.data["why"]
    assert site.ask().status_code == 200


def test_healthy_but_garbage_is_reverted(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", "garbage")
    assert ran.code == 3, ran.err
    assert "one character" in ran.data["why"]


def test_a_configuration_that_one_rank_does_not_run_is_reverted(make_site: MakeSite) -> None:
    site = make_site(nodes=2)
    ran = site.apply("--set", "split-rank=1")
    assert ran.code == 3, ran.err
    assert "black box rank 1" in ran.data["why"]


@pytest.mark.parametrize("attended", [False, True])
def test_a_rank_that_cannot_be_read_is_held_for_an_operator_and_reverted_without_one(make_site: MakeSite, attended: bool) -> None:
    site = make_site(nodes=2)
    boxes = site.folder / "boxes" / "node1" / "rank-1.box"
    ran = site.apply("--set", "no-box=1", *(["--attended"] if attended else []))
    assert outcomes(ran.data["checks"])["ranks"] == "inconclusive"
    assert boxes.exists()  # a stale one of the last start, which must not pass for this one
    assert ran.data["page_sent"] is True
    if not attended:
        assert ran.code == 3, ran.err
        return
    assert ran.code == 5, ran.err
    assert site.ask().status_code == 200
    assert site.services[0].lease_token() == ran.data["id"]
    told = site.rollout("status").data["last"]["next"]
    assert told.startswith("HELD, it could not be told: ranks: ") and "goes back by itself at" in told
    assert site.apply("--set", "page-size=32").code == 6
    again = site.rollout("abort", "--reason", "enough seen")
    assert again.code == 3 and again.errors == [] and again.data["ordered"], again.err
    assert again.data["why"].startswith("aborted as ordered by ") and again.data["why"].endswith(": enough seen")
    shown = site.rollout("show").data["entries"][-1]["data"]["result"]
    assert "reverted as ordered, and the revert is verified (aborted as ordered by " in shown
    assert all("--no-box" not in args for args in site.running)


def test_a_traceback_of_an_earlier_start_cannot_fail_a_good_change(make_site: MakeSite) -> None:
    site = make_site()
    service = site.services[0]
    service.begin_stop()
    wait_until(lambda: service.snapshot().state is State.inactive)
    log = site.folder / "log" / "node0.log"
    log.write_text(log.read_text() + 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: of long ago\n')
    site.start()
    assert site.apply("--set", "page-size=32").code == 0


@pytest.mark.parametrize("trouble", ["crash-after=16", "complain-after=15"])
def test_a_crash_or_an_exception_of_a_new_kind_in_the_stability_window_is_reverted(make_site: MakeSite, trouble: str) -> None:
    site = make_site()
    ran = site.apply("--set", trouble, "--stable-s", "2")
    assert ran.code == 3, ran.err
    assert ran.data["checks"][-1]["outcome"] == "failed" and "TypeError" in ran.data["checks"][-1]["data"]["tracebacks"][0]
    assert outcomes(ran.data["checks"])["json"] == "passed"  # the last rung: it came to the window


def test_an_end_with_exit_status_0_is_a_failure_too(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", "crash-after=2", "--set", "crash-exit=0", "--stable-s", "5")
    assert ran.code == 3, ran.err


def test_a_red_baseline_refuses_and_an_incident_takes_the_recorded_one(make_site: MakeSite) -> None:
    site = make_site()
    assert site.rollout("verify").code == 0
    service = site.services[0]
    service.begin_stop()
    wait_until(lambda: service.snapshot().state is State.inactive)
    refused = site.apply("--set", "page-size=32")
    assert refused.code == 9
    assert "--incident" in refused.errors[0]["remedy"]
    assert site.apply("--set", "page-size=32", "--incident").code == 0
    assert site.ask().status_code == 200


def test_an_incident_without_a_verified_configuration_is_refused(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", "page-size=32", "--incident")
    assert ran.code == 2
    assert "nothing to go back to" in ran.errors[0]["message"]


def test_a_revert_that_fails_is_stuck_and_paged(make_site: MakeSite, tmp_path: Path) -> None:
    poison = tmp_path / "poison"
    site = make_site(args=["--dies-of", str(poison)])
    ran = site.apply("--set", f"poison={poison}")
    assert ran.code == 4, ran.err
    assert ran.data["state"] == "stuck"
    assert ran.data["page_sent"] is True
    assert "STUCK" in site.pages.got[-1]["title"]
    assert site.services[0].read_change().trial is None
    poison.unlink()
    assert site.rollout("abort").code == 3


def test_a_server_that_never_answers_is_given_up_at_the_deadline_of_one_answer(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", "deaf", "--boot-deadline-s", "2")
    assert ran.code == 3, ran.err
    assert outcomes(ran.data["checks"])["completion"] == "failed"


def test_a_page_that_cannot_go_out_is_said(make_site: MakeSite) -> None:
    site = make_site()
    site.write_fleet(page_url="json://127.0.0.1:9/")
    ran = site.apply("--set", "garbage")
    assert ran.code == 3
    assert ran.data["page_sent"] is False
    assert "json://127.0.0.1:9" in ran.data["page"]["reason"]


def test_the_plan_shows_arguments_and_digests_and_touches_nothing(make_site: MakeSite) -> None:
    site = make_site(nodes=2)
    ran = site.rollout("plan", "--set", "grammar-backend=none", "--env", "A=b c")
    assert ran.code == 0
    assert "+--grammar-backend none" in ran.data["diff"] and "+A=b c" in ran.data["diff"]
    assert ran.data["digest_before"] != ran.data["digest_after"]
    assert ran.data["services"][1]["after"]["argv"][-2:] == ["--grammar-backend", "none"]
    assert not (site.folder / "state" / "lastbatch" / "rollouts" / "d").exists()
    dry = site.rollout("apply", "-n", "--set", "grammar-backend=none", "--env", "A=b c")
    assert json.loads(dry.out)["data"]["digest"] == ran.data["digest"]


def test_a_change_that_changes_nothing_is_refused(make_site: MakeSite) -> None:
    site = make_site(args=["--page-size", "32"])
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 2
    assert "nothing to roll out" in ran.errors[0]["message"]


def test_without_yes_and_off_a_terminal_nothing_is_asked_and_nothing_done(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.rollout("apply", "--set", "page-size=32")
    assert ran.code == 2
    assert site.services[0].read_change().trial is None


@pytest.mark.parametrize("damage", [b"garbage\n", b""])
def test_a_journal_that_cannot_be_read_is_named_and_says_what_to_do(make_site: MakeSite, damage: bytes) -> None:
    site = make_site()
    assert site.apply("--set", "page-size=32").code == 0
    path = journal.all_of(site.folder / "state" / "lastbatch" / "rollouts" / "d")[-1]
    path.write_bytes(damage + path.read_bytes() if damage else b"")
    status = site.rollout("status")
    assert status.code == 0, status.err
    assert status.data["last"]["state"] == "unreadable"
    if damage:
        ran = site.apply("--set", "page-size=64")
        assert ran.code == 2, ran.err
        assert str(path) in ran.errors[0]["message"] + ran.errors[0]["remedy"]
