"""The real engine as systemd units on two real nodes: it serves, wedges, is captured, changed, watched and lost.

The nodes and the group start once for the module (``twonodes.py``).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitors.capture import bundle
from monitors.judge.verdict import Class
from tests.e2e import nodes
from tests.e2e.serving import wait_for
from tests.e2e.twonodes import CONSTRAINED, HOMES, RUN_DIR, UNIT, Group

pytestmark = pytest.mark.nodes

FAULTS = ("--fault", "grammar.verify_desync", "--fault", "decode.crash:when=sequential")
STALL_S = 4.0
ALARMS = {"suspicion", "stall_declared", "crash_declared", "captured", "verdict", "page"}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    why = nodes.missing(ssh=True)
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as undo:
        made = Group(tmp_path_factory.mktemp("group"), undo, FAULTS)
        made.start()
        yield made


def test_two_units_serve_one_model_over_the_fabric(group: Group) -> None:
    fingerprint = group.complete()
    info = group.get("/server_info").json()
    assert [(one["rank"], one["node"]) for one in info["ranks"]] == [(0, 0), (1, 0), (2, 1)]
    assert "TCP between 2 nodes" in info["paths"]["collectives"]
    leader, follower = group.show("InvocationID")
    assert fingerprint == f"lb-{info['config_digest'][:12]}-{leader[:8]}"
    headers = [group.box(rank).header for rank in range(3)]
    assert [header.invocation_id for header in headers] == [leader, leader, follower]
    assert {header.config_digest for header in headers} == {info["config_digest"]}
    code, answer, err = group.opsctl("rollout", "verify")
    assert code == 0, err + json.dumps(answer)


def test_idle_units_raise_nothing_and_a_wedge_is_captured_from_both_nodes(group: Group) -> None:
    invocations = group.show("InvocationID")
    with group.watching(stall_s=STALL_S) as monitor:
        monitor.wait("state", 30)
        quiet_until = time.monotonic() + STALL_S + 2
        wait_for(lambda: time.monotonic() > quiet_until, STALL_S + 5, "a time of idling")
        group.complete()
        group.ask({"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3000, "temperature": 0, "ignore_eos": True}, 90)
        wait_for(lambda: group.box(0).host.running > 0, 20, "the first request to run")
        assert not {event["event"] for event in monitor.events} & ALARMS, monitor.events
        group.ask(CONSTRAINED, 90)
        monitor.wait("stall_declared", 40)
        captured = monitor.wait("captured", 60)
        verdict = monitor.wait("verdict", 10)
        assert monitor.wait("page", 20)["page_sent"] is True
    assert verdict["verdict"] == Class.hang_grammar_barrier.value, verdict
    assert group.pages()[-1] == "tiny: hang_grammar_barrier"
    folder = Path(captured["bundle"])
    assert bundle.verify(folder).ok
    taken = {(item["path"], item["node"]) for item in bundle.load(folder)["items"] if item["outcome"] == "taken"}
    assert {(f"rank-{rank}.box", node) for rank, node in HOMES} <= taken, taken
    assert {(f"pyspy-{rank}.json", node) for rank, node in HOMES} <= taken, captured["gaps"]
    for node, name in (("a", "journal.jsonl"), ("b", "journal.b-lastbatch@tiny.jsonl")):
        assert (name, node) in taken
        said = " ".join(str(json.loads(line)["MESSAGE"]) for line in (folder / name).read_text().splitlines())
        assert "Started" in said and "verify_desync" not in said, "the fault is named: the verdict proves nothing"
    assert group.show("InvocationID") == invocations and group.states() == ["active", "active"], "captured too late"


def test_a_node_that_is_cut_off_in_the_middle_of_a_capture_is_a_named_gap_and_the_bundle_is_whole(group: Group) -> None:
    """The group stands as the test before left it: wedged, and not restarted by anybody."""
    root = group.folder / "state/lastbatch/bundles"
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        job = aside.submit(group.opsctl, "capture", "--budget-s", "25")
        with group.cut_off_in_capture(root):
            code, answer, err = job.result(90)
    assert code == 0, err
    folder = Path(answer["data"]["bundle"])
    assert bundle.verify(folder).ok
    items = bundle.load(folder)["items"]
    gaps = [item for item in items if item["node"] == "b" and item["outcome"] == "failed"]
    assert any("node b: not reached since" in item["reason"] for item in gaps), gaps
    taken = {item["path"] for item in items if item["outcome"] == "taken"}
    assert {"rank-0.box", "rank-1.box", "rank-2.box", "pyspy-0.json", "pyspy-1.json", "journal.jsonl"} <= taken, "node a is whole"
    said = (folder / "report.md").read_text()
    assert answer["data"]["verdict"] == Class.hang_grammar_barrier.value, f"what was there before the cut tells the class: {said}"
    assert answer["data"]["seconds"] < 27, "a lost node costs one wait"
    group.wait_serving()  # a group whose node was lost starts again


def test_a_change_that_crashes_is_reverted_on_both_nodes_and_the_fix_is_committed(group: Group) -> None:
    before = group.digests()
    code, answer, err = group.opsctl("rollout", "apply", "--set", "disable-overlap-schedule", "--incident", "--yes", deadline_s=240)
    assert code == 3, err
    failed = next(check for check in answer["data"]["checks"] if check["outcome"] == "failed")
    assert "TypeError" in json.dumps(failed["data"]), failed
    assert {check["outcome"] for check in answer["data"]["revert_checks"]} == {"passed"}
    assert answer["data"]["page_sent"] is True and group.pages()[-1] == "tiny: rollout reverted"
    assert group.written() == [[], []]
    assert group.digests() == before
    group.complete()

    code, answer, err = group.opsctl("rollout", "apply", "--set", "grammar-backend=none", "--incident", "--yes", deadline_s=240)
    assert code == 0, err
    assert group.written() == [[f"/etc/systemd/system/{UNIT}.d/zz-opsctl-50.conf"]] * 2
    assert set(group.digests()) == {answer["data"]["checks"][2]["data"]["/server_info"]} != set(before)
    refused = group.ask(CONSTRAINED).result(30)
    assert refused.status_code == 400 and "--grammar-backend none" in refused.text
    group.complete()


def test_a_stop_leaves_nothing_behind_and_systemds_watchdog_ends_a_frozen_rank_with_evidence(group: Group) -> None:
    assert all(len(group.remains(node)) > 3 for node in group.nodes), "the look finds nothing, so it proves nothing"
    group.stop()
    assert [group.remains(node) for node in group.nodes] == [[], []]
    for node in group.nodes:
        group.drop_in(node, "20-watchdog.conf", "WatchdogSec=6\n")
    group.start()
    invocations = group.show("InvocationID")
    node, pid = group.rank_pid(1)
    group.kill(node, pid, signal.SIGSTOP)
    wait_for(lambda: not group.serves(), 20, "the group's end")
    group.wait_serving()
    assert "Watchdog timeout (limit 6s)!" in group.journals()
    assert int(group.show("NRestarts")[0]) >= 1
    assert not set(group.show("InvocationID")) & set(invocations)
    (stacks,) = (node.root / RUN_DIR).glob("evidence-*/stacks-1.txt")
    assert "follow (" in stacks.read_text(), stacks.read_text()
    group.complete()


def test_a_lost_node_takes_the_group_down_with_evidence_and_it_comes_back_together(group: Group) -> None:
    invocations, restarts = group.show("InvocationID"), group.show("NRestarts")
    leader, follower = group.nodes
    group.kill(follower, int(group.show("MainPID")[1]), signal.SIGKILL)
    wait_for(lambda: not set(group.show("InvocationID")) & set(invocations), 60, "new starts of both units")
    group.wait_serving()
    assert all(int(now) > int(then) for now, then in zip(group.show("NRestarts"), restarts, strict=True))
    assert "node 1 was started again" in group.journals()
    assert list((leader.root / RUN_DIR).glob("evidence-*/rank-0.box"))
    group.complete()
