"""What `hang-monitor unit` prints for a fleet file: the hardened unit, opened by what bundles and on_wedge need and no more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from monitors import cli, fleet
from monitors.exit_codes import ExitCode
from monitors.packaging import unit
from tests.e2e.nodes import SystemdNode, boot, missing
from tests.monitors.cluster import ROOT, until

HEAD = '[deployment.small]\nengine = "vllm"\napi = "http://127.0.0.1:9"\n'
NODE = '[[deployment.small.node]]\nname = "n"\n'
SERVICE = '[[deployment.small.node.service]]\nunit = "small.service"\n'
PLAYBOOK = 'on_wedge = { action = "playbook", playbook = "respond-to-wedge" }\n'
RESTART = 'on_wedge = { action = "restart" }\n'


def printed(toml: str, found: bool = True) -> str:
    return unit.text("/opt/bin/hang-monitor", "/etc/f.toml", fleet.parse(toml, "/etc/f.toml") if found else None)


def values(text: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_a_fleet_file_that_only_pages_gets_the_unit_as_it_is_packaged() -> None:
    text = printed(HEAD + NODE + SERVICE)
    assert text == printed("", found=False)
    assert not values(text, "ReadWritePaths") and not values(text, "ExecStartPre") and values(text, "ProtectSystem") == ["strict"]
    assert values(text, "ExecStart")[0].startswith("/opt/bin/hang-monitor run --fleet /etc/f.toml ")


def test_a_restart_may_note_that_it_was_ordered_and_a_playbook_may_roll_out() -> None:
    assert values(printed(HEAD + RESTART + NODE + SERVICE), "ReadWritePaths") == ["-/run/opsctl"]
    text = printed(HEAD + PLAYBOOK + NODE + SERVICE)
    folders = [word.removeprefix("-") for word in values(text, "ReadWritePaths")[0].split()]
    assert {"/run/opsctl", "/run/systemd/system", "/etc/systemd/system", "/var/lib/opsctl"} <= set(folders)
    assert values(text, "ExecStartPre") == [f"+/bin/mkdir -p {' '.join(folders)}"]
    assert text.index("ReadWritePaths=") < text.index("[Install]")


def test_what_is_done_over_ssh_needs_nothing_here() -> None:
    text = printed(HEAD + PLAYBOOK + NODE + 'ssh = "root@n"\n' + SERVICE)
    assert not values(text, "ReadWritePaths") and values(text, "MemoryMax")[-1] == "1G"


def test_bundles_kept_elsewhere_can_be_written() -> None:
    assert values(printed(HEAD + 'bundle_dir = "/srv/bundles"\n' + NODE + SERVICE), "ReadWritePaths") == ["-/srv/bundles"]
    assert not values(printed(HEAD + 'bundle_dir = "/var/lib/hang-monitor/b"\n' + NODE + SERVICE), "ReadWritePaths")


def test_boxes_and_logs_in_tmp_are_seen() -> None:
    assert values(printed(HEAD + NODE + SERVICE + 'log = "/tmp/small.log"\n'), "PrivateTmp")[-1] == "no"
    assert values(printed(HEAD + NODE + SERVICE + 'log = "/srv/tmp/small.log"\n'), "PrivateTmp") == ["yes"]


@pytest.mark.parametrize("manager", ["embedded", "systemd-user"])
def test_an_action_on_services_that_a_system_unit_cannot_restart_is_refused(manager: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    ours = f'{HEAD}service = "{manager}"\n{{}}{NODE}{SERVICE}log = "/var/log/small.log"\n'
    file.write_text(ours.format(RESTART))
    done = CliRunner().invoke(cli.app, ["unit", "--fleet", str(file)])
    assert done.exit_code == ExitCode.USAGE and f'service = "{manager}"' in done.output and "[Service]" not in done.output
    file.write_text(ours.format(""))
    assert CliRunner().invoke(cli.app, ["unit", "--fleet", str(file)]).exit_code == ExitCode.DONE


def test_a_fleet_file_that_is_wrong_is_told_and_one_that_is_not_there_yet_as_well(tmp_path: Path) -> None:
    absent = CliRunner().invoke(cli.app, ["unit", "--fleet", str(tmp_path / "none.toml")])
    assert absent.exit_code == ExitCode.DONE and "is not there" in absent.stderr and "ProtectSystem=strict" in absent.stdout
    (tmp_path / "bad.toml").write_text("[deployment.x]\n")
    assert CliRunner().invoke(cli.app, ["unit", "--fleet", str(tmp_path / "bad.toml")]).exit_code == ExitCode.USAGE


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SystemdNode]:
    node = boot("onwedge", tmp_path / "nodes")
    try:
        yield node
    finally:
        node.stop()


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_from_inside_the_printed_unit_opsctl_restarts_and_may_write_what_a_rollout_writes(machine: SystemdNode) -> None:
    toml = f"{HEAD}{PLAYBOOK}{NODE}{SERVICE}"
    (machine.root / "etc/lastbatch").mkdir()
    (machine.root / "etc/lastbatch/fleet.toml").write_text(toml)
    units = machine.root / "etc/systemd/system"
    (units / "small.service").write_text("[Service]\nExecStart=/bin/sleep 1000\n")
    acts = "".join(
        f"ExecStart={command}\n"
        for command in (
            f"{sys.executable} -m opsctl.cli service restart-group --fleet /etc/lastbatch/fleet.toml --deployment small --json",
            "/bin/sh -c 'for d in /run/systemd/system /run/systemd/system.control /etc/systemd/system /var/lib/opsctl; "
            "do mkdir -p $d/small.service.d && echo x >$d/small.service.d/x && rm -r $d/small.service.d || exit 3; done'",
            "/bin/sh -c '! touch /etc/elsewhere'",
        )
    )
    # Only what is started is another; the node may not read the kernel's log.
    site = f"[Service]\nType=oneshot\nWatchdogSec=0\nRestart=no\nEnvironment=PYTHONPATH={ROOT}\nExecStart=\n{acts}"
    site += "CPUQuota=\nCapabilityBoundingSet=\nCapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_KILL\n"
    site += "AmbientCapabilities=\nAmbientCapabilities=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_KILL\n"
    (units / "hang-monitor.service").write_text(printed(toml))
    (units / "hang-monitor.service.d").mkdir()
    (units / "hang-monitor.service.d/site.conf").write_text(site)
    assert machine.run(["systemctl", "daemon-reload"]).code == 0
    assert machine.run(["systemctl", "start", "small"]).code == 0

    def pid() -> bytes:
        return machine.run(["systemctl", "show", "-P", "MainPID", "small"]).out

    before = pid()
    done = machine.run(["systemctl", "start", "hang-monitor"], deadline_s=60)
    said = machine.run(["journalctl", "-u", "hang-monitor", "-o", "cat", "--no-pager"]).out.decode()
    assert done.code == 0, f"{done.err}\n{said}"
    until(lambda: pid() not in (before, b"0\n"), "the server is another start")
    assert (machine.root / "run/opsctl/small.service/ordered").read_text().strip(), "the order is noted, so that it pages nobody"
