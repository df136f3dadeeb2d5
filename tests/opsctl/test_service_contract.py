"""One contract for every service manager: the embedded supervisor, and on a real node systemd's units, those of a user's
own manager, and a unit that runs a container (under a fake runtime, ``fake_runtime.py``: no container engine is here)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import nodes

from opsctl.rollout import overlay
from opsctl.service import wait
from opsctl.service.container import ContainerService
from opsctl.service.manager import Change, Lease, LeaseLost, Locked, Override, ServiceError, State
from opsctl.service.systemd import SystemdService
from tests.opsctl.site import wait_until
from tests.opsctl.steady_services import WAITER, Make, embedded, on_node, said, start

AWKWARD = [
    '{"a": 1}',
    "100%",
    "%n",
    "$HOME ${PATH}",
    'q"uo"te',
    "it's",
    "back\\slash\\n",
    "a  b",
    "",
    "line\nbreak",
    "tab\there",
    "äö",
    "--x=;",
    "@-",
]


ON_NODE = ["systemd", "systemd-user", "container"]


@pytest.fixture(params=["embedded", *(pytest.param(name, marks=pytest.mark.nodes) for name in ON_NODE)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    if request.param == "embedded":
        yield from embedded(tmp_path)
    else:
        yield from on_node(request.getfixturevalue("node"), request.param)


def test_a_start_has_an_invocation_that_the_program_knows_too(make: Make) -> None:
    service = make("--one")
    assert service.snapshot().state is State.inactive
    invocation = start(service)
    found = service.snapshot()
    assert len(invocation) == 32 and found.main_pid > 0 and found.restarts == 0 and found.result == "success" and found.since_mono > 0
    assert said(service, invocation) == {"invocation": invocation, "argv": ["serve", "--one"], "mark": "defined"}
    assert list(service.argv())[-2:] == ["serve", "--one"] == list(service.command().argv)[-2:]
    assert service.preflight() == ()


def test_each_start_has_lines_of_its_own_and_the_managers_lines_about_it(make: Make) -> None:
    service = make()
    first = start(service)
    wait.stop([service], WAITER, 30)
    assert service.snapshot().state is State.inactive and service.snapshot().main_pid == 0
    second = start(service)
    assert first != second
    assert said(service, first)["invocation"] == first and said(service, second)["invocation"] == second
    for invocation, other in ((first, second), (second, first)):
        lines = service.log(invocation)
        assert any(line.manager for line in lines)
        assert not any(other in line.text for line in lines)
        assert service.log(invocation, last_s=600.0) == lines
    assert service.log("0" * 32) == ()


def test_a_service_is_activating_until_it_says_ready(make: Make) -> None:
    service = make("--unready")
    wait.start([service], WAITER, 30)
    said(service, service.snapshot().invocation_id)
    found = service.snapshot()
    assert found.state is State.activating and found.running and not found.waiting_to_restart


def test_a_crash_is_restarted_and_its_whole_traceback_stays_with_its_own_start(make: Make) -> None:
    service = make("--raise")
    first = next(iter(wait.start([service], WAITER, 30).values())).invocation_id
    WAITER.until("a restart", lambda: service.snapshot().restarts >= 1 and service.snapshot().invocation_id != first, 30)
    wait_until(lambda: any("Main process exited" in line.text for line in service.log(first)), what="the manager's line about the exit")
    texts = [line.text for line in service.log(first) if not line.manager]
    head = texts.index("Traceback (most recent call last):")
    assert texts[-1] == "ValueError: of this very start" and len(texts) - head >= 3
    wait.stop([service], WAITER, 30)
    assert not service.snapshot().waiting_to_restart


def test_an_end_with_status_0_is_no_failure_and_no_restart(make: Make) -> None:
    service = make("--silent-exit")
    wait.start([service], WAITER, 30)
    WAITER.until("the end", lambda: service.snapshot().state is State.inactive, 30)
    assert service.snapshot().restarts == 0 and service.snapshot().result == "success"


def test_a_stop_leaves_nothing_even_of_a_child_in_a_session_of_its_own(make: Make) -> None:
    service = make("--child")
    start(service)
    _, out, _ = service.run(("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), 10)
    assert "sleep 4242" in out
    wait.stop([service], WAITER, 30)
    _, out, _ = service.run(("sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"), 10)
    assert "sleep 4242" not in out


def test_awkward_arguments_and_variables_arrive_byte_for_byte(make: Make) -> None:
    service = make()
    argv = (*service.command().argv, *AWKWARD)
    mark = "m $HOME 100% \"q\" \\ 'x'"
    service.arm(Lease("t", 60))
    service.write_trial(Override(argv, {"MARK": mark}))
    assert service.command().argv == argv
    assert service.read_change().trial == Override(argv, {"MARK": mark})
    invocation = start(service)
    assert said(service, invocation)["argv"] == ["serve", *AWKWARD]
    assert said(service, invocation)["mark"] == mark
    assert service.argv()[-len(AWKWARD) :] == tuple(AWKWARD)


def test_a_trial_hides_the_committed_override_until_it_is_committed_or_removed(make: Make) -> None:
    service = make("--one")
    base = service.command().argv
    service.arm(Lease("t", 60))
    service.write_trial(Override((*base, "--two"), {}))
    service.commit_trial()
    assert service.command().argv == (*base, "--two")
    assert service.read_change() == type(service.read_change())(Override((*base, "--two"), {}), None)
    service.write_trial(Override((*base, "--three"), {}))
    assert service.command().argv == (*base, "--three")
    service.remove_trial()
    assert service.command().argv == (*base, "--two")
    service.remove_trial()
    service.commit_trial()
    assert service.command().argv == (*base, "--two")


def test_a_lease_that_ends_removes_the_trial_and_restarts(make: Make) -> None:
    service = make("--one")
    first = start(service)
    service.arm(Lease("t", 0.6))
    service.write_trial(Override((*service.command().argv, "--trial"), {}))
    wait_until(lambda: service.lease_token() == "" and service.snapshot().invocation_id != first, what="the dead-man")
    assert service.read_change().trial is None
    WAITER.until("ready", lambda: service.snapshot().state is State.active, 30)
    assert "--trial" not in service.argv()
    with pytest.raises(LeaseLost):
        service.renew("t", 60)
    assert service.decided(Lease("t", 1)) == "revert"


def test_a_dead_man_finishes_what_was_decided_as_committed(make: Make) -> None:
    service = make("--one")
    first = start(service)
    lease = Lease("t", 2.0)
    service.arm(lease)
    wanted = (*service.command().argv, "--kept")
    service.write_trial(Override(wanted, {}))
    assert service.decide(lease, "commit") == "commit" == service.decide(lease, "revert")
    wait_until(lambda: service.read_change().trial is None, what="the dead-man")
    assert service.read_change().committed == Override(wanted, {})
    assert service.snapshot().invocation_id == first


def test_a_commit_is_prepared_decided_and_withdrawn_as_long_as_nobody_acted_on_it(make: Make) -> None:
    service = make("--one")
    base = service.command().argv
    lease = Lease("t", 60)
    with pytest.raises((LeaseLost, ServiceError)):
        service.prepare_commit(lease)
    service.arm(lease)
    service.write_trial(Override((*base, "--two"), {"A": "b"}))
    service.prepare_commit(lease)
    assert service.decide(lease, "commit") == "commit"
    assert service.withdraw(lease) and service.decided(lease) == "revert"
    service.restore(None)
    assert service.read_change() == Change() and service.command().argv == base
    service.disarm("t")
    again = Lease("u", 60)
    service.arm(again)
    service.write_trial(Override((*base, "--two"), {"A": "b"}))
    service.prepare_commit(again)
    assert service.decide(again, "commit") == "commit"
    service.commit_trial()
    assert not service.withdraw(again)  # it was acted on: only another change undoes it
    assert service.read_change() == Change(Override((*base, "--two"), {"A": "b"}))
    service.restore(Override((*base, "--three"), {}))
    assert service.command().argv == (*base, "--three")
    service.restore(None)
    assert service.command().argv == base


def test_a_lease_that_ends_before_anything_was_changed_costs_no_restart_and_still_pages(make: Make) -> None:
    service = make()
    first = start(service)
    service.arm(Lease("t", 0.4, on_expiry=("true",), title="d"))
    wait_until(lambda: service.lease_token() == "", what="the dead-man")
    assert service.decided(Lease("t", 1)) == "revert"
    assert service.snapshot().invocation_id == first and service.snapshot().state is State.active


def test_a_lease_that_ends_while_the_service_is_stopped_for_a_revert_starts_it_again(make: Make) -> None:
    service = make()
    first = start(service)
    service.arm(Lease("t", 1.0))  # a second lease of the same rollout: the trial has gone with the first
    wait.stop([service], WAITER, 30)
    wait_until(lambda: service.lease_token() == "" and service.snapshot().state is State.active, what="the dead-man")
    assert service.snapshot().invocation_id != first


def test_a_file_is_mounted_over_another_for_the_service_alone(make: Make, tmp_path: Path) -> None:
    service = make()
    if isinstance(service, ContainerService):
        pytest.skip("a container sees nothing of the unit's mounts; the plan refuses it")
    service.keep_file("new.txt", b"patched")
    target = "/etc/hostname"
    service.arm(Lease("t", 60))
    service.write_trial(Override(service.command().argv, {}, {target: service.kept_path("new.txt")}))
    assert service.command().mounts == {target: service.kept_path("new.txt")}
    start(service)
    sums = overlay.seen(service, target, service.pids())
    assert service.snapshot().main_pid in sums and set(sums.values()) == {hashlib.sha256(b"patched").hexdigest()}
    assert service.read_file(target) != b"patched"


def test_a_renewed_lease_lives_and_nobody_else_gets_in(make: Make) -> None:
    service = make()
    start(service)
    service.arm(Lease("t", 1.0))
    service.renew("t", 60)
    assert service.lease_token() == "t"
    with pytest.raises(Locked):
        service.arm(Lease("other", 1))
    with pytest.raises(LeaseLost):
        service.renew("other", 1)
    service.disarm("other")
    assert service.lease_token() == "t"
    service.disarm("t")
    assert service.lease_token() == ""


def test_files_and_commands_are_read_where_the_service_runs(make: Make, tmp_path: Path) -> None:
    service = make()
    assert service.read_file("/proc/sys/kernel/ostype") == b"Linux\n"
    with pytest.raises(FileNotFoundError):
        service.read_file("/no/such/file")
    assert service.run(("sh", "-c", 'echo "$MARK"; exit 3'), 10)[:2] == (3, "defined\n")


@pytest.mark.nodes
def test_an_argument_that_systemd_would_expand_is_refused_not_guessed(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/expands.service").write_text("[Service]\nExecStart=/bin/sleep $SECONDS_TO_SLEEP 100%%\n")
    node.run(["systemctl", "daemon-reload"])
    with pytest.raises(ServiceError, match="SECONDS_TO_SLEEP"):
        SystemdService(node, "expands.service").command()


@pytest.mark.nodes
def test_what_would_outlive_a_stop_or_win_over_the_trial_is_refused(node: nodes.SystemdNode) -> None:
    folder = node.root / "etc/systemd/system/loose.service.d"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "zzz-mine.conf").write_text("[Service]\nEnvironment=A=b\n")
    (node.root / "etc/systemd/system/loose.service").write_text("[Service]\nExecStart=/bin/sleep 100\nKillMode=process\n")
    node.run(["systemctl", "daemon-reload"])
    problems = SystemdService(node, "loose.service").preflight()
    assert len(problems) == 2
    assert "KillMode=process" in problems[0] and "zzz-mine.conf" in problems[1]
    assert "no.service" in SystemdService(node, "no.service").preflight()[0]


@pytest.mark.nodes
def test_a_drop_in_edited_by_hand_is_noticed(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/edited.service").write_text("[Service]\nExecStart=/bin/sleep 100\n")
    service = SystemdService(node, "edited.service")
    service.write_trial(Override(("/bin/sleep", "200"), {}))
    path = node.root / "run/systemd/system/edited.service.d/zz-opsctl-90-trial.conf"
    path.write_text(path.read_text().replace("200", "300", 1))
    with pytest.raises(ServiceError, match="changed by hand"):
        service.read_change()
    service.remove_trial()


@pytest.mark.nodes
def test_a_start_that_systemd_refuses_for_its_limit_is_made_all_the_same(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/limited.service").write_text(
        "[Unit]\nStartLimitBurst=1\nStartLimitIntervalSec=1h\n[Service]\nExecStart=/bin/false\n"
    )
    node.run(["systemctl", "daemon-reload"])
    service = SystemdService(node, "limited.service")
    first = next(iter(wait.start([service], WAITER, 30).values())).invocation_id
    WAITER.until("its failure", lambda: service.snapshot().state is State.failed, 10)
    assert next(iter(wait.start([service], WAITER, 30).values())).invocation_id != first


@pytest.mark.nodes
def test_a_dead_man_puts_back_what_was_taken_out_of_its_router_once_it_is_active(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/routed.service").write_text("[Service]\nExecStart=/bin/sleep 100\n")
    node.run(["systemctl", "daemon-reload"])
    service = SystemdService(node, "routed.service")
    service.arm(Lease("t", 0.4))
    service.set_undrain(("sh", "-c", "systemctl is-active routed.service >/run/routed"), 5)
    wait_until(lambda: (node.root / "run/routed").is_file() and service.lease_token() == "", 30, "the router to be told")
    assert (node.root / "run/routed").read_text() == "active\n"
    wait_until(lambda: not (node.root / "run/opsctl/routed.service/undrain").exists(), what="the order to be taken away")


@pytest.mark.nodes
def test_a_lease_that_ended_without_a_dead_man_locks_nobody_out(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/orphaned.service").write_text("[Service]\nExecStart=/bin/sleep 100\n")
    node.run(["systemctl", "daemon-reload"])
    service = SystemdService(node, "orphaned.service")
    folder = node.root / "run/opsctl/orphaned.service"
    folder.mkdir(parents=True)
    (folder / "lease").write_text("long-gone 100\n")  # its operator died before the dead-man was started
    service.arm(Lease("mine", 60))
    assert service.lease_token() == "mine"
    with pytest.raises(Locked, match="held by rollout mine"):
        service.arm(Lease("another", 60))
    service.disarm("mine")


@pytest.mark.nodes
def test_a_page_that_the_node_cannot_get_out_is_owed_there(node: nodes.SystemdNode) -> None:
    (node.root / "etc/systemd/system/owing.service").write_text("[Service]\nExecStart=/bin/sleep 100\n")
    node.run(["sh", "-c", "systemctl daemon-reload; systemctl start owing.service"])
    service = SystemdService(node, "owing.service")
    service.arm(Lease("tok", 0.4, pages=("json://127.0.0.1:9/secret",), title="d"))
    mode = node.run(["stat", "-c", "%a", "/run/opsctl/owing.service/page.urls"]).out.decode().strip()
    assert mode == "600"
    wait_until(lambda: b"NO PAGE WENT OUT" in node.run(["journalctl", "-u", "opsctl-deadman-owing.service"]).out, 30, "the attempt")
    (owed,) = [one for one in service.owed() if "owing.service" in one]  # the node is shared
    title, text = owed.split("\n")
    assert title == "d: rollout left by its operator, owing.service on opsctl-contract"
    assert "went back" in text and "owing.service is now active" in text and "[tok]" in text and "secret" not in owed
    service.forget_owed()
    assert service.owed() == ()
