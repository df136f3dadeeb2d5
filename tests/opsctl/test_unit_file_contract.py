"""What a node makes of another unit file: hidden, committed, taken back, whatever is cut off or edited meanwhile."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import nodes

from opsctl.service import fragment, wait
from opsctl.service.manager import Change, Lease, Override, ServiceError, State, UnitFile
from opsctl.service.systemd import SystemdService
from tests.opsctl.site import wait_until
from tests.opsctl.steady_services import WAITER, on_node, said, start

STOPS = "TimeoutStopSec=7"


def other_file(service: SystemdService) -> str:
    """The present file with another way to stop, and its command line as it is."""
    return service.unit_source().files[0][1].replace("TimeoutStopSec=2", STOPS)


def laid(service: SystemdService, text: str, lease: Lease) -> Override:
    """A trial with this unit file, as a rollout makes it."""
    source = service.unit_source()
    file = UnitFile(fragment.name(text, source.path.rpartition("/")[2]), source.own)
    made = Override(service.command().argv, {"MARK": "trial"}, unit=file)
    service.arm(lease)
    service.keep_file(file.name, text.encode())
    service.write_trial(made)
    return made


@pytest.fixture
def unit(request: pytest.FixtureRequest, node: nodes.SystemdNode) -> Iterator[SystemdService]:
    maker = on_node(node, getattr(request, "param", "systemd"))
    make = next(maker)
    service = make("--one")
    assert isinstance(service, SystemdService)
    yield service
    next(maker, None)


@pytest.mark.nodes
@pytest.mark.parametrize("unit", ["systemd", "systemd-user"], indirect=True)
def test_another_unit_file_hides_the_old_one_until_it_is_committed_or_taken_back(unit: SystemdService) -> None:
    source = unit.unit_source()
    (path, old), lease = source.files[0], Lease("t", 60)
    new = other_file(unit)
    made = laid(unit, new, lease)
    assert unit.stop_limit_s() == 7.0 and unit.unit_source().files[0] == (source.trial, new)
    assert unit.read_file(path).decode() == old and unit.read_change() == Change(None, made)
    unit.remove_trial()
    assert unit.stop_limit_s() == 2.0
    unit.write_trial(made)
    unit.prepare_commit(lease)
    unit.commit_trial()
    assert unit.unit_source().files[0] == (path, new) and unit.read_change() == Change(made) and unit.stop_limit_s() == 7.0
    unit.restore(None)
    assert unit.unit_source().files[0] == (path, old) and unit.read_change() == Change()
    unit.restore(made)  # a node that lost its trial by a reboot after it was decided
    assert unit.unit_source().files[0] == (path, new)
    unit.restore(None)


@pytest.mark.nodes
def test_a_commit_that_was_cut_between_its_two_renames_is_finished_or_undone(unit: SystemdService) -> None:
    old, path = unit.unit_source().files[0][1], unit.unit_source().path
    new, lease = other_file(unit), Lease("t", 60)
    made = laid(unit, new, lease)
    for end in (made, None):
        unit.put(f"{path}.d", "zz-opsctl-50.conf", unit.committed_file(made)[1].encode())  # the first rename, and no more
        unit.remove_trial()  # the power went, and /run with it
        assert unit.read_change() == Change(Override(made.argv, made.env)), "its unit file is not there, and it says so"
        unit.restore(end)
        assert unit.read_change() == Change(end) and unit.read_file(path).decode() == (new if end else old)
        unit.restore(None)
    assert unit.unit_source().files[0] == (path, old)


@pytest.mark.nodes
def test_a_unit_file_that_somebody_else_changed_is_left_alone(unit: SystemdService) -> None:
    source, text = unit.unit_source(), other_file(unit)
    (path, old), folder = source.files[0], source.path.rpartition("/")[0]
    theirs = old + "# mine\n"
    unit.put(folder, path.rpartition("/")[2], theirs.encode())
    made = UnitFile(fragment.name(text, path.rpartition("/")[2]), source.own)
    unit.arm(Lease("t", 60))
    unit.keep_file(made.name, text.encode())
    with pytest.raises(ServiceError, match="changed since the plan"):
        unit.write_trial(Override(unit.command().argv, unit=made))
    committed = Override(unit.command().argv, unit=made)
    unit.put(f"{path}.d", "zz-opsctl-50.conf", unit.committed_file(committed)[1].encode())
    with pytest.raises(ServiceError, match="somebody else changed it"):
        unit.restore(None)
    assert unit.read_file(path).decode() == theirs
    unit.restore(committed)  # nothing to settle: the edit since then is the administrator's
    assert unit.read_file(path).decode() == theirs


@pytest.mark.nodes
def test_a_dead_man_that_is_killed_at_its_work_takes_the_unit_file_back_all_the_same(node: nodes.SystemdNode) -> None:
    maker = on_node(node, "systemd")
    unit = next(maker)("--one")
    assert isinstance(unit, SystemdService)
    first = start(unit)
    old, path = unit.unit_source().files[0][1], unit.unit_source().path
    laid(unit, other_file(unit), Lease("t", 60))
    wait.stop([unit], WAITER, 30)
    dead_man = f"opsctl-deadman-{unit.name.rpartition('@')[0]}"
    # The instant between the end of the lease and the removal of the trial: the lease has been moved, and then it dies.
    folder = f"/run/opsctl/{unit.name.rpartition('@')[0]}"
    node.run(["sh", "-c", f"systemctl kill -s STOP {dead_man}; mv {folder}/lease {folder}/lease.ended; printf revert >{folder}/decision-t; "
                          f"systemctl kill -s KILL {dead_man}"])  # fmt: skip
    wait_until(lambda: unit.read_change().trial is None and unit.snapshot().state is State.active, 20, "the dead-man that came back")
    assert unit.unit_source().files[0] == (path, old) and unit.stop_limit_s() == 2.0
    assert unit.snapshot().invocation_id != first and said(unit, unit.snapshot().invocation_id)["mark"] == "defined"
    next(maker, None)


@pytest.mark.slow
@pytest.mark.nodes
def test_a_reboot_takes_a_trial_of_a_unit_file_away_and_leaves_a_commit(tmp_path: Path) -> None:
    if nodes.missing():
        pytest.skip(nodes.missing())
    keep, name = {"NODES_KEEP": "1"}, "opsctl-reboot"
    machine = nodes.boot(name, tmp_path, env=keep)
    try:
        unit = next(on_node(machine, "systemd"))("--one")
        assert isinstance(unit, SystemdService)
        new = other_file(unit)
        kept = laid(unit, new, Lease("t", 60))
        unit.commit_trial()
        again = laid(unit, new.replace(STOPS, "TimeoutStopSec=9"), Lease("t", 60))
        assert unit.stop_limit_s() == 9.0 and unit.read_change() == Change(kept, again)
        machine.power_off()
        wait_until(lambda: not machine.root.parent.exists(), what="the machine to be off")
        machine = nodes.boot(name, tmp_path, env=keep)
        unit = SystemdService(machine, unit.name.rpartition("@")[0])
        assert unit.stop_limit_s() == 7.0 and unit.read_change() == Change(kept) and unit.unit_source().files[0][1] == new
    finally:
        machine.stop()
        for kept_here in Path("/dev/shm/lastbatch-nodes").glob(f"{name}-*"):
            shutil.rmtree(kept_here, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run's machines are there too
            Path("/dev/shm/lastbatch-nodes").rmdir()


@pytest.mark.nodes
def test_a_unit_file_is_checked_by_the_nodes_ownon_node(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/checked@.service").write_text("[Service]\nExecStart=/bin/sleep 100\n")
    node.run(["systemctl", "daemon-reload"])
    service = SystemdService(node, "checked@a.service")
    assert service.check_unit("[Service]\nExecStart=/bin/sleep 200\n") == ((), "")
    folders = service.unit_source().folders
    text = f"[Service]\nExecStart=/bin/sleep 9\nEnvironment={' '.join(f'{name}=%{name}' for name in folders)}\n"
    (node.root / "etc/systemd/system/checked@b.service").write_text(text)
    node.run(["systemctl", "daemon-reload"])
    assert SystemdService(node, "checked@b.service").command().env == folders, "as this systemd has them"
    (line,), _ = service.check_unit("[Service]\nExecStart=/bin/sleep 200\nMemroyMax=3G\n")
    assert line == "checked@a.service:3: Unknown key 'MemroyMax' in section [Service], ignoring."
    assert "not executable" in service.check_unit("[Service]\nExecStart=/bin/sleeep 200\n")[0][0]
    (node.root / "etc/systemd/system/linked.service").symlink_to("/etc/systemd/system/checked@.service")
    with pytest.raises(ServiceError, match="is a link"):
        SystemdService(node, "linked.service").unit_source()
