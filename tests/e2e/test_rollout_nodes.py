"""Rollouts of one group over two real systemd nodes, reached by ssh over a network that can be cut."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.e2e import nodes
from tests.e2e.rollout_fleet import UNIT, Fleet
from tests.opsctl.site import SERVER, wait_until

pytestmark = pytest.mark.nodes
FAKE_RUNTIME = SERVER.parent / "fake_runtime.py"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    why = nodes.missing(ssh=True)
    if why:
        pytest.skip(why)
    made = Fleet.__new__(Fleet)
    try:
        made.__init__(tmp_path_factory.mktemp("fleet"))  # type: ignore[misc]
        yield made
    finally:
        made.close()


def test_a_crash_on_the_first_decode_is_reverted_on_both_nodes_and_paged(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "disable-overlap-schedule")
    assert code == 3, err
    failed = next(check for check in answer["data"]["checks"] if check["outcome"] == "failed")
    assert failed["data"]["tracebacks"][0].endswith("TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'")
    assert [check["outcome"] for check in answer["data"]["revert_checks"]] == ["passed"] * 5
    assert answer["data"]["page_sent"] is True and fleet.pages() == ["d: rollout reverted"]
    assert fleet.none_runs("--disable-overlap-schedule") and fleet.drop_ins() == [[], []]


def test_a_good_change_is_committed_on_both_nodes_whatever_tracebacks_the_journal_holds_of_before(fleet: Fleet) -> None:
    assert b"Traceback" in fleet.nodes[0].run(["journalctl", "-u", UNIT]).out
    code, answer, err = fleet.apply("--set", "page-size=32")
    assert code == 0, err
    assert {check["outcome"] for check in answer["data"]["checks"]} == {"passed"}
    assert {"boot", "argv", "ranks", "completion", "log", "steady"} <= {check["name"] for check in answer["data"]["checks"]}
    assert fleet.all_run("--page-size")
    assert fleet.drop_ins() == [[f"/etc/systemd/system/{UNIT}.d/zz-opsctl-50.conf"]] * 2


@pytest.mark.slow  # what becomes of the file on a node is in tests/opsctl/test_unit_file_contract.py
def test_another_unit_file_is_shown_checked_tried_and_taken_back_or_committed(fleet: Fleet) -> None:
    def files(more: str, flags: str = "") -> list[str]:
        words = []
        for at, node in enumerate(fleet.nodes, 1):
            text = (node.root / "etc/systemd/system" / UNIT).read_text().replace("TimeoutStopSec=5", f"TimeoutStopSec=6\n{more}")
            (fleet.folder / f"n{at}.service").write_text(text.replace(" serve ", f" serve {flags} ") if flags else text)
            words += ["--unit-file", f"{UNIT}@n{at}={fleet.folder}/n{at}.service"]
        return words

    def there() -> list[str]:
        return [(node.root / "etc/systemd/system" / UNIT).read_text() for node in fleet.nodes]

    before = there()
    code, answer, _ = fleet.rollout("plan", *files("MemroyMax=3G"))
    assert code == 2 and "lb.service:7: Unknown key 'MemroyMax'" in answer["errors"][0]["message"]
    code, answer, err = fleet.apply(*files("OOMScoreAdjust=0", "--fail-at-boot"))
    assert code == 3, err
    assert there() == before and fleet.none_runs("--fail-at-boot")
    code, answer, _ = fleet.rollout("plan", *files("OOMScoreAdjust=7"))
    assert code == 0 and f"n2:/etc/systemd/system/{UNIT} (at the commit)" in answer["data"]["diff"]
    assert "-TimeoutStopSec=5\n+TimeoutStopSec=6\n+OOMScoreAdjust=7" in answer["data"]["diff"]
    code, answer, err = fleet.apply(*files("OOMScoreAdjust=7"))
    assert code == 0, err
    assert [text.count("OOMScoreAdjust=7") for text in there()] == [1, 1] and fleet.all_run("serve")
    pids = [node.run(["systemctl", "show", "-P", "MainPID", UNIT]).out.decode().strip() for node in fleet.nodes]
    assert [(node.root / f"proc/{pid}/oom_score_adj").read_text() for node, pid in zip(fleet.nodes, pids, strict=True)] == ["7\n"] * 2
    code, answer, _ = fleet.rollout("status")
    assert all(service["unit_file"].endswith("-lb.service") for service in answer["data"]["services"])


def test_an_unknown_flag_is_refused_by_the_nodes_own_build(fleet: Fleet) -> None:
    code, answer, _ = fleet.apply("--set", "page-sise=32")
    assert code == 2
    assert "page-sise" in answer["errors"][0]["message"]


def test_a_boot_that_never_ends_is_reverted_at_its_deadline(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "never-ready", "--boot-deadline-s", "3")
    assert code == 3, err
    assert "not within 3 s" in answer["data"]["why"]


def test_a_configuration_that_one_node_does_not_run_is_reverted(fleet: Fleet) -> None:
    code, answer, err = fleet.apply("--set", "split-rank=1")
    assert code == 3, err
    assert "black box rank 1" in answer["data"]["why"]


def test_killed_and_left_alone_each_node_reverts_by_itself_and_pages(fleet: Fleet) -> None:
    with fleet.soaking("--set", "max-queued-requests=99", "--stable-s", "60", "--lease-s", "6") as process:
        assert fleet.all_run("--max-queued-requests")
        fleet.nodes[0].run(["systemctl", "kill", "-s", "KILL", f"opsctl-deadman-{UNIT}"])  # it comes back, and its lease with it
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: fleet.none_runs("--max-queued-requests"), 40, "both nodes to revert")
    assert fleet.drop_ins() == [[f"/etc/systemd/system/{UNIT}.d/zz-opsctl-50.conf"]] * 2
    left = "d: rollout left by its operator, lb.service on"
    wait_until(lambda: {f"{left} n1", f"{left} n2"} <= set(fleet.pages()), 20, "both nodes to page")
    code, answer, err = fleet.rollout("resume")
    assert code == 3, err
    assert "dead-man" in answer["data"]["why"]


def test_killed_in_the_stability_window_and_resumed_it_is_committed(fleet: Fleet) -> None:
    with fleet.soaking("--set", "max-queued-requests=98", "--stable-s", "3", "--lease-s", "60") as process:
        process.send_signal(signal.SIGKILL)
    code, _, err = fleet.rollout("resume")
    assert code == 0, err
    assert fleet.all_run("--max-queued-requests")


@pytest.mark.slow  # `make prove-rollout` has a row for each moment of it
def test_a_node_that_is_cut_off_reverts_alone_and_the_operator_is_paged(fleet: Fleet) -> None:
    with fleet.soaking("--set", "max-queued-requests=97", "--stable-s", "60", "--lease-s", "6") as process:
        fleet.cut(1)
        try:
            assert process.wait(timeout=90) == 4
            assert "d: rollout STUCK" in fleet.pages()
            wait_until(lambda: fleet.argv(fleet.nodes[1]) and "97" not in fleet.argv(fleet.nodes[1]), 30, "the cut-off node to revert")
        finally:
            fleet.mend(1)
    until = time.monotonic() + 60
    while (code := fleet.rollout("abort")[0]) != 3 and time.monotonic() < until:
        pass
    assert code == 3
    assert fleet.none_runs("97")


@pytest.mark.slow
def test_another_image_of_a_units_container_is_rolled_out_and_one_that_is_not_there_refused(fleet: Fleet) -> None:
    """Under the fake runtime, named so: no container engine is here. The server inside is the contract server."""
    node, port = fleet.nodes[0], 30001
    start = f"{FAKE_RUNTIME} run --rm --name box lb:1 serve --host 0.0.0.0 --port {port} --speaks sglang"
    (node.root / "etc/systemd/system/box.service").write_text(
        f"[Service]\nType=notify\nNotifyAccess=all\nExecStart={start}\nEnvironment=FAKE_RUNTIME_PROGRAM={sys.executable}:{SERVER} "
        "PYTHONUNBUFFERED=1\nKillMode=mixed\nTimeoutStopSec=5\nSuccessExitStatus=143\n"
    )
    node.run(["sh", "-c", "systemctl daemon-reload; systemctl start box.service; echo lb:1 lb:2 >/run/fake-runtime/.images"])
    whole = (fleet.folder / "fleet.toml").read_text()
    ssh = f"-F {fleet.folder / 'ssh_config'} n1"
    (fleet.folder / "fleet.toml").write_text(
        f"[deployment.box]\nengine = 'sglang'\napi = 'http://10.77.0.11:{port}'\nstable_s = 0.5\n[[deployment.box.node]]\nname = 'n1'\n"
        f"ssh = '{ssh}'\n[[deployment.box.node.service]]\nunit = 'box.service'\ncontainer = 'box'\n"
        "[page]\nurls = ['json://10.77.0.1:9000/']\n"
    )
    try:
        code, answer, _ = fleet.rollout("plan", "--image", "lb:3")
        assert code == 2 and "the new image lb:3 is not there on n1; pull it first" in answer["errors"][0]["message"]
        code, answer, err = fleet.apply("--image", "lb:2")
        assert code == 0, (err, answer["errors"])
        assert "lb:2" in fleet.argv(node, "box.service")
        snapshot = fleet.rollout("status")[1]["data"]["services"][0]
        assert len(snapshot["container_id"]) == 64 and "lb:2" in snapshot["argv"]
    finally:
        (fleet.folder / "fleet.toml").write_text(whole)
        node.run(["systemctl", "stop", "box.service"])
