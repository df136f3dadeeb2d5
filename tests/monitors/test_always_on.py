"""The monitor as a service: its word to systemd, planned ends, a monitor that is killed, what follows a capture."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monitors import daemon, fleet, planned
from monitors.capture import manifest
from monitors.judge.progress import Limits
from monitors.liveness import Liveness
from monitors.sdnotify import Notifier
from tests.monitors.cluster import HEALTHY, ROOT, Cluster, fleet_text, until, web
from tests.monitors.test_daemon import Monitor, write_fleet


def test_systemd_hears_ready_after_the_first_look_and_nothing_while_a_watch_is_stuck(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(5)
        now = [100.0]
        alive = Liveness(Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000"}), fleet.Heartbeat(), print, lambda: now[0])
        assert not alive.turn([{"deployment": "a", "state": "unknown"}])
        look = {"deployment": "a", "state": "busy", "looked_utc": "1"}
        assert alive.turn([look])
        assert manager.recv(200) == b"READY=1" and manager.recv(200) == b"WATCHDOG=1\nSTATUS=a busy"
        now[0] += 60  # the watch has not looked since
        assert not alive.turn([look])
        assert alive.turn([{**look, "looked_utc": "2"}])
        assert manager.recv(200).startswith(b"WATCHDOG=1")


def test_a_heartbeat_is_fetched_and_a_failure_is_told_once(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []
    now = [0.0]
    with web({"/beat": (404, "")}) as server:
        alive = Liveness(Notifier({}), fleet.Heartbeat(url=f"{server.url}/beat", every_s=10), told.append, lambda: now[0])
        for look in range(3):
            now[0] += 11
            alive.turn([{"deployment": "a", "state": "idle", "looked_utc": str(look)}])
            until(lambda: told, "the failure is told")
        assert len(told) == 1 and told[0]["ok"] is False
        server.pages["/beat"] = (200, "ok")
        now[0] += 11
        alive.turn([{"deployment": "a", "state": "idle", "looked_utc": "9"}])
        until(lambda: len(told) == 2 and told[1]["ok"], "and that it is over")


ENDED, NEXT = "ab" * 16, "cd" * 16


def told(text: str, mono_s: float | None = None, invocation: str = ENDED) -> tuple[str, str]:
    found = planned.told(text, mono_s, invocation)
    return (found.event, found.text) if found else ("", "")


def test_a_lease_is_read_as_systemd_units_and_embedded_services_keep_it() -> None:
    assert "lease tok1" in told("uptime 100.5 9\nlease tok1 16000\n")[1]
    assert told("uptime 300.5 9\nlease tok1 16000\n") == ("", ""), "long ended"
    record = json.dumps({"token": "tok2", "until_mono": 130.0, "ttl_s": 60})
    assert "lease tok2" in told(f"uptime 100.5 9\nlease \nheld {record}", 100.0)[1]
    assert told(f"uptime 300.5 9\nheld {record}", 300.0) == ("", "")
    for nothing in ("uptime 100.5 9\nlease \nheld \n", "", "uptime 100 1\nheld {cut"):
        assert told(nothing) == ("", "")


@pytest.mark.parametrize(
    "mark",
    [
        f"ordered {ENDED}",
        f"stopping {json.dumps({'INVOCATION_ID': ENDED, 'MESSAGE': 'Stopping x'})}",
        f"state {json.dumps({'ordered': ENDED, 'invocation_id': NEXT})}",
    ],
    ids=["opsctl on a unit", "systemctl stop", "an embedded service"],
)
def test_a_start_that_was_told_to_stop_is_no_crash_and_the_next_one_is(mark: str) -> None:
    assert told(f"uptime 100.5 9\n{mark}") == ("planned_end", "the service manager was told to stop it")
    assert told(f"uptime 100.5 9\n{mark}", invocation=f"{NEXT}+{ENDED}")[0] == "planned_end", "its group goes down with it"
    assert told(f"uptime 100.5 9\n{mark}", invocation=NEXT) == ("", "")
    # An engine that does not say which start it is: the unit's last one is asked for.
    assert told(f"uptime 100.5 9\n{mark}\ninvocation {NEXT}", invocation="") == ("", "")


def test_a_dead_mans_revert_is_told_as_one() -> None:
    record = json.dumps({"ordered": ENDED, "ordered_by": "tok3"})
    for marks in (f"state {record}", "lease tok3 9000\nreverted tok3"):
        event, text = told(f"uptime 100.5 9\n{marks}")
        assert event == "deadman_reverted" and "operator is gone" in text and "opsctl rollout resume" in text
    assert told("uptime 100.5 9\nlease tok4 9000\nreverted tok3")[0] == "planned_end", "of an earlier rollout"


def test_an_end_under_a_rollouts_lease_is_no_crash(tmp_path: Path) -> None:
    with web(HEALTHY) as server, web() as receiver, Cluster(tmp_path) as cluster:
        monitor = Monitor(tmp_path, write_fleet(tmp_path, cluster, server.url, receiver))
        try:
            cluster.work()
            until(lambda: "busy" in monitor.states(), "the monitor sees work")
            lease = cluster.run_dir / ".supervisor/lease.json"
            lease.parent.mkdir()
            lease.write_text(json.dumps({"token": "planned", "until_mono": time.monotonic() + 60, "ttl_s": 60}))
            for process in cluster.ranks:
                process.kill()
            assert "planned" in monitor.wait("planned_end")["text"]
            assert not monitor.named("crash_declared") and not monitor.named("captured") and not receiver.posted
        finally:
            assert monitor.stop() == 0


def test_a_monitor_that_is_killed_pages_the_same_wedge_once_reports_its_bundle_and_tells_the_end(tmp_path: Path) -> None:
    with web(HEALTHY) as server, web() as receiver, Cluster(tmp_path) as cluster:
        file = write_fleet(tmp_path, cluster, server.url, receiver)
        monitor = Monitor(tmp_path, file)
        cluster.wedge("grammar")
        monitor.wait("page")
        folder = Path(monitor.wait("captured")["bundle"])
        until(lambda: monitor.named("archive"), "report and archive are made")
        assert manifest.verify(folder).ok and (folder / "report.html").is_file() and folder.with_name(folder.name + ".tar.zst").is_file()
        assert monitor.stop(9) == -9
        again = Monitor(tmp_path, file)
        try:
            until(lambda: "stalled" in again.states(), "the second monitor sees the stall")
            assert not again.named("stall_declared") and len(receiver.posted) == 1
            with Cluster(tmp_path, invocation="cd" * 16) as fresh:
                fresh.work()
                until(lambda: receiver.posted[-1]["title"] == "over: small: hang_grammar_barrier",
                      "whoever was woken by the first monitor hears of the end from the second")  # fmt: skip
        finally:
            assert again.stop() == 0


def test_a_wall_clock_that_steps_opens_nothing_and_pages_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's kernel clock cannot be stepped by a test; the process's word for it can."""
    offset, true_time = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + offset[0])
    with web(HEALTHY) as server, web() as receiver, Cluster(tmp_path, world=1) as cluster:
        events: list[dict[str, object]] = []
        whole = fleet.load(write_fleet(tmp_path, cluster, server.url, receiver))
        options = daemon.Options(Limits(1.0), 0.1, tmp_path / "state", tmp_path / "bundles")
        watch = daemon.Watch(whole, whole.one(), options, events.append)

        def turned(name: str) -> list[dict[str, object]]:
            watch.turn()
            return [event for event in events if event["event"] == name]

        try:
            cluster.work()
            for step in (-86400.0, 2 * 86400.0):  # a day back, then a day ahead of the truth, while all is well
                offset[0] += step
                until(lambda: turned("state"), "a look")
            assert not turned("stall_declared") and not turned("suspicion")
            cluster.wedge("symmetric")
            until(lambda: turned("page"), f"the page; {events}")
            for step in (-3 * 86400.0, 7200.0):
                offset[0] += step
                for _ in range(5):
                    turned("page")
            assert len(receiver.posted) == 1 and len(turned("stall_declared")) == 1
            assert str(turned("stall_declared")[0]["quiet_s"]).startswith("1."), "silence is measured on the monotonic clock"
        finally:
            watch.close()


def test_on_wedge_runs_opsctl_under_its_deadline(tmp_path: Path) -> None:
    from monitors import aftermath

    text = fleet_text([("a", tmp_path, tmp_path / "log")], "http://127.0.0.1:9", more='on_wedge = { action = "restart", deadline_s = 60 }')
    whole = fleet.parse(text, str(tmp_path / "none.toml"))
    argv = aftermath.command(whole, whole.one())
    assert argv[1:3] == ["service", "restart-group"] and argv[-3:] == ["--deployment", "small", "--json"]
    events: list[tuple[str, dict[str, object]]] = []
    aftermath.act(whole, whole.one(), lambda name, **fields: events.append((name, fields)))
    assert [name for name, _ in events] == ["acting", "acted"]
    assert events[1][1]["ok"] is False and "cannot be read" in str(events[1][1]["said"])


def test_on_wedge_runs_the_playbook_that_the_fleet_file_names_and_hears_how_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monitors import aftermath

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with web(HEALTHY) as server, web() as receiver:
        more = 'on_wedge = { action = "playbook", playbook = "tell-them", deadline_s = 60 }'
        place = [("a", tmp_path, tmp_path / "log")]
        (tmp_path / "fleet.toml").write_text(fleet_text(place, server.url, f"json://127.0.0.1:{receiver.port}/", more=more))
        whole = fleet.load(tmp_path / "fleet.toml")
        argv = aftermath.command(whole, whole.one())
        assert argv[1:4] == ["playbook", "run", "tell-them"] and {"--yes", "--incident", "--json", "--fleet", "--deployment"} <= set(argv)
        events: list[tuple[str, dict[str, object]]] = []
        aftermath.act(whole, whole.one(), lambda name, **fields: events.append((name, fields)))
        assert events[1][1]["ok"] is False and "tell-them" in str(events[1][1]["said"]), "there is none of that name yet"
        (tmp_path / "playbooks").mkdir()
        (tmp_path / "playbooks/tell-them.yaml").write_text(
            "name: tell-them\nkind: response\nsummary: x\nhypothesis: [{probe: health}]\n"
            "method: [{name: tell, page: a playbook says so, deadline_s: 30}]\n"
        )
        aftermath.act(whole, whole.one(), lambda name, **fields: events.append((name, fields)))
        assert events[3][1]["ok"] is True, events[3]
        assert receiver.posted[0]["message"].startswith("a playbook says so")


def test_the_printed_unit_names_this_machine_and_systemd_takes_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "monitors.cli", "unit", "--fleet", "/etc/lastbatch/fleet.toml"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Type=notify" in done.stdout and "WatchdogSec=" in done.stdout and "--fleet /etc/lastbatch/fleet.toml" in done.stdout
    assert "@" not in done.stdout.replace("https://", "")


def test_an_incident_is_paged_again_until_somebody_acknowledges_it(tmp_path: Path) -> None:
    with web(HEALTHY) as server, web() as receiver, Cluster(tmp_path) as cluster:
        file = write_fleet(tmp_path, cluster, server.url, receiver)
        file.write_text(file.read_text() + "remind_s = 1.0\n")
        monitor = Monitor(tmp_path, file)
        try:
            cluster.wedge("symmetric")
            until(lambda: len(receiver.posted) >= 2, "a reminder", 40)
            assert "not acknowledged" in receiver.posted[1]["message"]
            subprocess.run(
                [sys.executable, "-m", "monitors.cli", "ack", "small", "--state-dir", str(tmp_path / "state")], cwd=ROOT, check=True
            )
            count = len(receiver.posted)
            looked = len(monitor.events)
            time.sleep(2.5)  # longer than two reminders would take: their absence is the point
            assert len(receiver.posted) <= count + 1 and looked
        finally:
            assert monitor.stop() == 0
