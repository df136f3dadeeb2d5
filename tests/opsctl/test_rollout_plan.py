"""A plan shows everything and touches nothing; an apply refuses what cannot be right before it touches anything."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opsctl import cli
from opsctl.rollout import boots
from opsctl.service.manager import Override, State
from tests.opsctl.site import SERVER, Site, wait_until

MakeSite = Callable[..., Site]


def described(site: Site) -> Site:
    """The same deployment, its service described in the fleet file alone."""
    argv = [sys.executable, str(SERVER), "serve"]
    text = (site.folder / "fleet.toml").read_text()
    whole = f"unit = 'whole'\ncommand = {json.dumps(argv)}\nargs = ['--port', '{site.port}']\nrun_dir = '{site.folder}/boxes/whole'\n"
    (site.folder / "fleet.toml").write_text(text.replace("unit = 'node0'\n", whole))
    return site


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "log" not in path.parts}


def test_a_plan_touches_nothing_even_where_the_fleet_file_alone_describes_the_service(tmp_path: Path) -> None:
    site = described(Site(tmp_path / "s"))
    try:
        before = everything(site.folder)
        ran = site.rollout("plan", "--set", "page-size=32")
        assert ran.code == 0, ran.out
        assert site.rollout("status").code == 0 and site.rollout("history").code == 0
        assert everything(site.folder) == before
    finally:
        site.pages.close()


def test_a_plan_shows_files_order_revert_target_and_where_each_deadline_comes_from(make_site: MakeSite) -> None:
    site = make_site(nodes=2)
    assert site.rollout("verify").code == 0
    ran = site.rollout("plan", "--set", "page-size=32")
    data = ran.data
    assert f'committed.json (at the commit)\n@@ -0,0 +1 @@\n+{{"argv":[{json.dumps(sys.executable)}' in data["diff"]
    assert data["groups"] == [["node0", "node1"]]
    assert data["revert"]["runs_now"] is True and data["revert"]["digest"] == data["digest_before"]
    assert data["times"]["boot_s"] == 60.0 and "slowest of the last 1 recorded boots" in data["times_from"]["boot_s"]
    assert data["times"]["stop_s"] == 18.0 and "limit of 3 s" in data["times_from"]["stop_s"]
    assert set(data["times_from"]) == set(data["times"])
    text = text_of(site, "plan", "--set", "page-size=32")
    for word in ("revert target", "drain, stop and start together", "deadlines", "recorded boot", "until the commit the change lies in"):
        assert word in text, text


def text_of(site: Site, *words: str) -> str:
    out = io.StringIO()
    argv = [word for word in site.argv(*words) if word != "--json"]
    cli.main(argv, site.env, stdin=io.StringIO(), stdout=out, stderr=io.StringIO())
    return out.getvalue()


def test_a_history_without_rollouts_says_so(make_site: MakeSite) -> None:
    assert "no rollout of d yet" in text_of(make_site(), "history")


def test_a_port_that_the_fleet_file_does_not_know_is_refused_with_the_reason(make_site: MakeSite) -> None:
    site = make_site()
    ran = site.apply("--set", f"port={site.port + 1}")
    assert ran.code == 2
    assert f"find the API at http://127.0.0.1:{site.port}" in ran.errors[0]["message"]
    assert site.services[0].read_change().trial is None


def test_a_port_held_by_somebody_else_is_named_before_anything_is_started(make_site: MakeSite) -> None:
    site = make_site()
    assert site.rollout("verify").code == 0
    service = site.services[0]
    service.begin_stop()
    wait_until(lambda: service.snapshot().state is State.inactive)
    with socket.create_server(("127.0.0.1", site.port)):
        ran = site.apply("--set", "page-size=32", "--incident")
    assert ran.code == 2, ran.err
    assert f"port {site.port} on here is held by process {os.getpid()}" in ran.errors[0]["message"]
    assert service.snapshot().state is State.inactive


def test_a_red_baseline_may_be_gone_on_from_only_when_it_is_said(make_site: MakeSite) -> None:
    site = make_site(args=["--garbage"])
    refused = site.apply("--unset", "garbage")
    assert refused.code == 9 and "--allow-red" in refused.errors[0]["remedy"]
    refused = site.apply("--unset", "garbage", "--allow-red")
    assert refused.code == 2 and "--no-revert-target" in refused.errors[0]["remedy"]
    ran = site.apply("--unset", "garbage", "--allow-red", "--no-revert-target")
    assert ran.code == 0, ran.err
    assert site.rollout("status").data["verified"]["by"] == ran.data["id"]


def test_a_change_made_by_hand_past_the_rollout_is_taken_back_by_one_and_nothing_else_is_built_on_it(make_site: MakeSite) -> None:
    site = make_site()
    assert site.rollout("verify").code == 0
    service = site.services[0]
    service.restore(Override((*service.command().argv, "--page-size", "32")))
    refused = site.apply("--set", "page-size=64", "--incident")
    assert refused.code == 2 and "configured otherwise than when it was last verified" in refused.errors[0]["message"]
    ran = site.apply("--unset", "page-size", "--incident")
    assert ran.code == 0, ran.err


def test_a_crash_loop_is_not_recorded_as_verified_in_its_good_minute(make_site: MakeSite) -> None:
    site = make_site(args=["--crash-after", "4"])
    ran = site.rollout("verify", "--stable-s", "9")
    assert ran.code == 9, ran.err
    assert ran.data["verified"] is None
    assert ran.data["checks"][-1]["outcome"] == "failed"
    assert site.rollout("status").data["verified"] is None


def test_who_did_what_and_why_is_kept_and_shown(make_site: MakeSite) -> None:
    site = make_site()
    site.env["SUDO_USER"] = "alice"
    none = site.rollout("show")
    assert none.code == 2 and none.errors[0]["message"] == "no rollout of d yet, so there is none to show"
    ran = site.apply("--set", "page-size=32", "--reason", "longer prompts")
    assert ran.code == 0, ran.err
    entry = site.rollout("show").data
    assert entry["who"]["sudo_user"] == "alice" and entry["reason"] == "longer prompts" and entry["state"] == "committed"
    assert entry["entries"][-1]["data"]["exit_code"] == 0
    text = text_of(site, "show", ran.data["id"][:15])
    assert "sudo_user alice" in text and "+--page-size 32" in text and "committed" in text
    assert re.search(r"invocations: \S+ [0-9a-f]{8}$", text, re.MULTILINE) and "{'" not in text, "no raw structures"
    missing = site.rollout("show", "1999")
    assert missing.code == 2 and ran.data["id"] in missing.errors[0]["message"]


def test_boots_that_led_to_a_proven_service_are_recorded_and_shorten_the_next_deadline(make_site: MakeSite) -> None:
    site = make_site()
    assert "no boot of this deployment is recorded" in site.rollout("plan", "--set", "page-size=32").data["times_from"]["boot_s"]
    assert site.apply("--set", "fail-at-boot").code == 3
    recorded = boots.read(site.folder / "state" / "lastbatch" / "rollouts" / "d")
    assert [boot.by.split()[0] for boot in recorded] == ["verify", "revert"]
    assert site.rollout("plan", "--set", "page-size=32").data["times"]["boot_s"] == 60.0


def test_a_page_that_did_not_go_out_is_owed_and_sent_by_the_next_command(make_site: MakeSite) -> None:
    site = make_site()
    site.write_fleet(page_url="json://127.0.0.1:9/")
    assert site.apply("--set", "fail-at-boot").code == 3
    site.write_fleet()
    assert site.rollout("status").data["owed"] == ["d: rollout reverted"]
    ran = site.rollout("verify")
    assert ran.code == 0 and "sent now" in ran.err
    assert "late" in site.pages.got[0]["message"] and site.pages.got[0]["title"] == "d: rollout reverted"
    assert site.rollout("status").data["owed"] == []


def test_a_change_may_come_from_a_playbook_with_one_rollout_step(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site()
    step = "- name: change\n    rollout: {set: {page-size: 32}, env: {A: b}}\n    deadline_s: 60\n    approval: change-configuration\n"
    path = tmp_path / "larger-pages.yaml"
    head = "name: larger-pages\nkind: rollout\nsummary: larger pages\nhypothesis: [{probe: health}]\nmethod:\n  "
    path.write_text(head + step)
    ran = site.rollout("plan", "--playbook", str(path), "--set", "max-queued-requests=9")
    assert ran.code == 0, ran.out
    assert "+--page-size 32\n+--max-queued-requests 9\n+A=b" in ran.data["diff"] and ran.data["reason"] == "playbook larger-pages"
    path.write_text(head + step.replace("env: {A: b}", "stable_s: 7, hold_s: 900, failure_budget: 1, model: /nowhere"))
    ran = site.rollout("plan", "--playbook", str(path), "--failure-budget", "0", "--model", "", "--stable-s", "0")
    assert ran.code == 2 and "/nowhere" in ran.errors[0]["message"], ran.out  # an empty name is none
    path.write_text(head + step.replace("env: {A: b}", "stable_s: 7, hold_s: 900, failure_budget: 1"))
    ran = site.rollout("plan", "--playbook", str(path), "--failure-budget", "0", "--stable-s", "0")
    assert ran.code == 0, ran.out
    assert (ran.data["times"]["stable_s"], ran.data["times"]["hold_s"]) == (0.0, 900.0), "what is given beside it counts, else its own"
    path.write_text(head + step + "  " + step.replace("name: change", "name: again"))
    ran = site.rollout("plan", "--playbook", str(path))
    assert ran.code == 2 and "one rollout step" in ran.errors[0]["message"]
    ran = site.rollout("plan", "--playbook", "disable-overlap")  # one that ships, by its name
    assert ran.code == 0 and "disable-overlap-schedule" in ran.data["diff"], ran.out
    ran = site.rollout("plan", "--playbook", "disable-overlaps")
    assert ran.code == 2 and 'did you mean "disable-overlap"?' in ran.errors[0]["message"]
    ran = site.rollout("plan", "--set", "page-size=32", "--failure-budget", "1")
    assert ran.code == 2 and "has 1 replica(s)" in ran.errors[0]["message"]


def test_a_unit_file_is_refused_where_there_are_none_and_where_the_file_is_not(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site()
    ran = site.rollout("plan", "--unit-file", str(tmp_path / "none.service"))
    assert ran.code == 2 and "No such file" in ran.errors[0]["message"]
    (tmp_path / "x.service").write_text("[Service]\nExecStart=/bin/sleep 1\n")
    ran = site.rollout("plan", "--unit-file", str(tmp_path / "x.service"))
    assert ran.code == 2 and "has no unit files; change its definition" in ran.errors[0]["message"]


def test_a_deployments_services_and_their_logs_are_seen_by_the_fleet_file(make_site: MakeSite) -> None:
    site = make_site(nodes=2)

    def service(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        fleet = str(site.folder / "fleet.toml")
        code = cli.main(["service", *words, "--fleet", fleet], site.env, stdin=io.StringIO(), stdout=out, stderr=err)
        return int(code), out.getvalue(), err.getvalue()

    wait_until(lambda: [line.split(",")[0] for line in service("status")[1].splitlines()] == ["node0: active", "node1: active"])
    assert "boot of" in service("log", "node1")[1]
    assert service("log")[2].startswith("error: Invalid value: NAME: say whose log: node0, node1")
    code, _, err = service("status", "node7")
    assert code == 2 and "d has no service node7, but node0, node1" in err


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs an ssh client")
def test_a_status_tells_of_the_rest_when_a_node_is_not_reached(tmp_path: Path) -> None:
    node = "[[deployment.d.node]]\nname = 'n1'\nssh = '-p 9 127.0.0.1'\n[[deployment.d.node.service]]\nunit = 'lb.service'\n"
    (tmp_path / "fleet.toml").write_text(f"[deployment.d]\nengine = 'lastbatch'\napi = 'http://127.0.0.1:9'\n{node}")
    out, err = io.StringIO(), io.StringIO()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    code = cli.main(["rollout", "status", "--fleet", str(tmp_path / "fleet.toml")], env, stdin=io.StringIO(), stdout=out, stderr=err)
    assert code == 7
    assert out.getvalue().splitlines()[0] == "lb.service@n1: NOT REACHED, so what runs there is not known"
    assert "no rollout yet" in out.getvalue() and "ssh` of the fleet file by hand" in err.getvalue()
