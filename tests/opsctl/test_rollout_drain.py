"""A group leaves its router before it is stopped, and is back at every end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from monitors.fleet import FleetError, load
from tests.opsctl.site import Site, wait_until

MakeSite = Callable[..., Site]


def routed(site: Site, *, out: str = "true", back: str = "true") -> Path:
    """The site behind a router whose log is the file that is returned: one word for each command that it was given."""
    log = site.folder / "router"
    log.touch()
    keys = f"drain = ['sh', '-c', 'echo out >>{log}; {out}']\nundrain = ['sh', '-c', 'echo back >>{log}; {back}']\ndrain_s = 5\n"
    fleet = site.folder / "fleet.toml"
    fleet.write_text(fleet.read_text().replace("name = 'a'\n", f"name = 'a'\n{keys}"))
    return log


def test_a_group_is_out_while_it_restarts_and_back_before_its_clients_are_asked(make_site: MakeSite) -> None:
    site = make_site()
    log = routed(site)
    assert site.rollout("plan", "--set", "page-size=32").data["drains"][0]["back"][:2] == ["sh", "-c"]
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 0, ran.err
    assert log.read_text().split() == ["out", "back"]
    told = [entry["event"] or entry["state"] for entry in site.rollout("show").data["entries"]]
    assert told[: told.index("back") + 1] == ["planned", "armed", "applied", "draining", "restarted", "proving", "back"]
    assert site.rollout("status").data["out_of_router"] == ""


def test_a_router_that_does_not_let_go_stops_the_change_and_not_the_server_and_what_it_keeps_is_paged(make_site: MakeSite) -> None:
    site = make_site()
    log = routed(site, out="echo no such worker >&2; exit 4", back="exit 5")
    before = site.services[0].snapshot().invocation_id
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 3 and "exit status 4: no such worker" in ran.data["why"], ran.err
    assert log.read_text().split()[:2] == ["out", "back"]
    assert site.services[0].snapshot().invocation_id == before and site.services[0].read_change().trial is None
    assert "node0 is STILL OUT OF ITS ROUTER; put it back there: sh -c" in site.pages.got[-1]["message"]
    assert "STILL OUT" in site.rollout("status").data["out_of_router"]


def test_killed_while_the_group_is_out_the_dead_man_puts_it_back(make_site: MakeSite) -> None:
    site = make_site()
    log = routed(site)
    process = site.spawn("apply", "--yes", "--set", "never-ready", "--lease-s", "1.5")
    try:
        wait_until(lambda: site.journals.is_dir() and any(b'"restarted"' in p.read_bytes() for p in site.journals.glob("*.jsonl")), 30)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate(timeout=10)
    wait_until(lambda: log.read_text().split() == ["out", "back"], 30, "the dead-man to put it back")
    assert site.answers()


def test_a_drain_that_nobody_lifts_is_refused(make_site: MakeSite) -> None:
    site = make_site()
    fleet = site.folder / "fleet.toml"
    fleet.write_text(fleet.read_text().replace("name = 'a'\n", "name = 'a'\ndrain = ['true']\n"))
    with pytest.raises(FleetError, match=r"node\[0\].drain: without undrain"):
        load(fleet)
