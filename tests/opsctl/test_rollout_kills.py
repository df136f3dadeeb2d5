"""The operator dies in the middle. However it is cut, the group ends on one side: all new and committed, or all old."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from opsctl.rollout import journal
from opsctl.service.manager import Lease, Override, State
from tests.opsctl.kills import Kills
from tests.opsctl.site import Site, wait_until

MakeSite = Callable[..., Site]
NEW = ["--page-size", "32"]
STATES = ["planned", "armed", "applied", "restarted", "proving", "soaking"]


def journal_of(site: Site) -> Path | None:
    found = journal.all_of(site.folder / "state" / "lastbatch" / "rollouts" / "d")
    return found[-1] if found else None


def reached(site: Site, state: str) -> bool:
    path = journal_of(site)
    return path is not None and f'"state":"{state}"'.encode() in path.read_bytes()


def kill_at(site: Site, state: str, *words: str) -> None:
    """SIGKILL ``opsctl rollout apply`` as soon as its journal announces ``state``."""
    process = site.spawn("apply", "--yes", "--boot-deadline-s", "8", *words)
    wait_until(lambda: reached(site, state) or process.poll() is not None, 20, f"the journal to say {state}")
    kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


def side(site: Site) -> str:
    """``new`` or ``old`` when every service runs the same and nothing is pending; else what is there."""
    changes = [service.read_change() for service in site.services]
    running = [args[-2:] == NEW for args in site.running]
    if any(change.trial for change in changes) or any(service.lease_token() for service in site.services):
        return f"undecided: {changes}"
    if all(running) and all(change.committed for change in changes):
        return "new"
    return "old" if not any(running) and not any(change.committed for change in changes) else f"split: {running} {changes}"


@pytest.mark.parametrize("state", STATES[:-1])
def test_killed_and_left_alone_the_dead_man_reverts_and_pages(make_site: MakeSite, state: str) -> None:
    site = make_site(nodes=2)
    kill_at(site, state, "--set", "page-size=32", "--stable-s", "20", "--lease-s", "1")
    wait_until(lambda: side(site) == "old", 15, "every service to be as it was")
    wait_until(site.answers, 10)
    assert site.ask().status_code == 200
    if state not in ("planned", "armed"):  # in these it may have died before any dead-man was armed
        wait_until(lambda: site.pages.got, 15, "a page")
        assert "dead-man" in site.pages.got[0]["title"]


def test_after_a_dead_mans_revert_status_says_who_and_why_and_resume_proves_it_without_a_restart(make_site: MakeSite) -> None:
    site = make_site()
    kill_at(site, "soaking", "--set", "page-size=32", "--stable-s", "20", "--lease-s", "1")
    wait_until(lambda: side(site) == "old" and site.answers(), 15, "the dead-man")
    last = site.rollout("status").data["last"]["next"]
    assert (
        last.startswith("REVERTED BY THE DEAD-MAN: node0 at 20") and "the lease for 1 s" in last and "Next: opsctl rollout resume" in last
    )
    before = site.services[0].snapshot().invocation_id
    ran = site.rollout("resume")
    assert ran.code == 3, ran.err
    assert site.services[0].snapshot().invocation_id == before and "is proven as it is" in ran.err
    wait_until(lambda: any("dead-man" in page["title"] for page in site.pages.got), 15, "the dead-man's page")
    assert site.rollout("status").data["last"]["next"] == ""


def test_a_change_that_arguments_do_not_show_is_started_again_where_a_reboot_took_it_away(make_site: MakeSite) -> None:
    site = make_site()
    kill_at(site, "proving", "--env", "MARK=new", "--stable-s", "0.3", "--lease-s", "60")
    service = site.services[0]
    service.remove_trial()  # as after a reboot: the same arguments run, without the variable
    service.begin_stop()
    wait_until(lambda: service.snapshot().state is State.inactive)
    service.begin_start()
    wait_until(site.answers)
    ran = site.rollout("resume")
    assert ran.code == 0, ran.err
    assert b"MARK=new" in Path(f"/proc/{service.snapshot().main_pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("state", STATES)
def test_killed_and_resumed_it_is_committed(make_site: MakeSite, state: str) -> None:
    site = make_site(nodes=2)
    kill_at(site, state, "--set", "page-size=32", "--stable-s", "0.3", "--lease-s", "30")
    ran = site.rollout("resume")
    if ran.code == 2:  # it had just been committed when it was killed
        assert "under way" in ran.errors[0]["message"]
    else:
        assert ran.code == 0, ran.err
    assert side(site) == "new"
    assert site.ask().status_code == 200


@pytest.mark.parametrize("state", ["armed", "restarted", "soaking"])
def test_killed_and_aborted_it_is_reverted(make_site: MakeSite, state: str) -> None:
    site = make_site(nodes=2)
    kill_at(site, state, "--set", "page-size=32", "--stable-s", "20", "--lease-s", "30")
    ran = site.rollout("abort")
    assert ran.code == 3, ran.err
    assert side(site) == "old"
    assert site.ask().status_code == 200


def test_killed_while_it_reverts_the_dead_man_finishes(make_site: MakeSite) -> None:
    site = make_site(nodes=2)
    kill_at(site, "reverting", "--set", "garbage", "--lease-s", "1")
    wait_until(lambda: side(site) == "old", 15, "every service to be as it was")
    wait_until(site.answers, 10)


def test_an_interrupt_after_the_change_reverts_and_exits_130(make_site: MakeSite) -> None:
    site = make_site()
    process = site.spawn("apply", "--yes", "--set", "page-size=32", "--stable-s", "30")
    wait_until(lambda: reached(site, "soaking"), 20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert side(site) == "old"


def test_a_second_rollout_is_locked_out_while_one_runs(make_site: MakeSite) -> None:
    site = make_site()
    process = site.spawn("apply", "--yes", "--set", "page-size=32", "--stable-s", "30")
    wait_until(lambda: reached(site, "soaking"), 20)
    ran = site.apply("--set", "page-size=64")
    assert ran.code == 6
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert side(site) == "old"


def test_an_operator_elsewhere_is_locked_out_by_the_lease_and_leaves_the_rollout_alone(make_site: MakeSite) -> None:
    site = make_site()
    service = site.services[0]
    service.arm(Lease("elsewhere", 60))
    first = service.snapshot().invocation_id
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 6, ran.err
    assert service.lease_token() == "elsewhere" and service.snapshot().invocation_id == first
    service.disarm("elsewhere")
    assert site.apply("--set", "page-size=32").code == 0  # what was locked out is closed


def test_a_rollout_that_comes_back_leaves_what_somebody_else_committed_meanwhile(make_site: MakeSite) -> None:
    site = make_site()
    kill_at(site, "soaking", "--set", "page-size=32", "--stable-s", "20", "--lease-s", "1")
    wait_until(lambda: side(site) == "old", 15, "the dead-man")
    service = site.services[0]
    theirs = Override((*service.command().argv, "--page-size", "64"), {})
    service.restore(theirs)
    for word in ("resume", "abort"):
        ran = site.rollout(word)
        assert ran.code == 4, ran.err
        assert "changed by somebody else" in ran.data["why"]
    assert service.read_change().committed == theirs and ran.data["page_sent"] is True


@pytest.mark.parametrize("seed", range(2))  # `make prove-rollout` draws 300
def test_any_kill_at_any_moment_ends_on_one_side(make_site: MakeSite, seed: int) -> None:
    site = make_site(nodes=2)
    assert site.rollout("verify").code == 0
    kills = Kills(site, seed)
    for _ in range(4):
        kills.run()
