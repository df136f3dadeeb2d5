"""``hang-monitor doctor``: proves what a capture needs, and says the remedy of what fails."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from monitors import doctor, fleet
from monitors.cli import app
from monitors.exit_codes import ExitCode
from tests.monitors.cluster import HEALTHY, Cluster, fleet_text, web


def test_what_a_capture_needs_is_proven_on_real_ranks(tmp_path: Path) -> None:
    with web(HEALTHY) as server, web() as receiver, Cluster(tmp_path, world=2) as cluster:
        more = f'bundle_dir = "{tmp_path}/bundles"'
        text = fleet_text([("a", cluster.run_dir, cluster.log)], server.url, f"json://127.0.0.1:{receiver.port}/", ranks=2, more=more)
        file = tmp_path / "fleet.toml"
        file.write_text(text)
        done = CliRunner().invoke(app, ["doctor", "--fleet", str(file), "--json"])
        proofs = {row["name"]: row for row in json.loads(done.stdout)["small"]}
        pids = [process.pid for process in cluster.ranks]
    proven = {name for name, row in proofs.items() if row["ok"]}
    assert {"reached", "clock", "disk for bundles", "metrics", "page", "ptrace", "time to declare", f"log {cluster.log}"} <= proven, proofs
    dumped = [name for name in proven if name.startswith("py-spy of pid")]
    assert sorted(int(name.split()[3]) for name in dumped) == sorted(pids)
    assert "2 black boxes" in proofs[f"run directory {cluster.run_dir}"]["text"]
    assert "at most" in proofs["time to declare"]["text"] and "offset" in proofs["clock"]["text"]
    assert proofs[f"flight recorder of pid {pids[0]}"]["ok"] is None, "absent is no fault"
    assert done.exit_code == (ExitCode.FOUND if any(row["ok"] is False for row in proofs.values()) else ExitCode.DONE)


def test_each_failure_names_its_remedy_and_a_node_that_cannot_be_reached_holds_up_nothing(tmp_path: Path) -> None:
    text = fleet_text([("a", tmp_path / "none", tmp_path / "no.log")], "http://127.0.0.1:9", more=f'bundle_dir = "{tmp_path}/b"')
    text += '[[deployment.small.node]]\nname = "far"\nssh = "-o ConnectTimeout=1 -p 9 127.0.0.1"\n'
    whole = fleet.parse(text, "fleet.toml")
    found = doctor.examine(whole, whole.one())
    failed = {(proof.where, proof.name): proof for proof in found if proof.ok is False}
    assert ("monitor", "page") not in failed, "a site without pages is told so, and it is no fault"
    assert {("monitor", "metrics"), ("a", f"log {tmp_path}/no.log"), ("far", "reached")} <= set(failed)
    assert all(proof.remedy for proof in failed.values())
    assert "refused" in failed["far", "reached"].text and "BatchMode" in failed["far", "reached"].remedy
    shown = doctor.table(found)
    assert "FAIL  far" in shown and "none  monitor    page: nobody is paged" in shown and "-> add urls to the [page] table" in shown


def test_what_is_absent_from_every_rank_is_one_line() -> None:
    rows = [doctor.Proof("a", f"flight recorder of pid {pid}", None, "not switched on", "set it") for pid in (7, 8, 9)]
    shown = doctor.table([*rows, doctor.Proof("a", "py-spy of pid 7", False, "no"), doctor.Proof("a", "py-spy of pid 8", False, "no")])
    assert shown.count("flight recorder") == 1 and "pid 7 and 2 more" in shown and shown.count("FAIL") == 2
