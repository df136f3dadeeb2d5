"""Case folders through the command line and the library: the verdict, its evidence, and what is honest about gaps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from monitors import casefolder
from monitors.capture import manifest
from monitors.cli import app
from monitors.exit_codes import ExitCode
from monitors.judge.signatures import SIGNATURES
from monitors.judge.verdict import Class, Verdict
from monitors.report import render

CASES = Path(__file__).parent / "cases"
SHARED = Path(__file__).parents[3] / "shared/cases"
EXPECTED = {
    "grammar_barrier": "hang_grammar_barrier",
    "host_callback": "hang_host_callback",
    "tp_desync": "hang_tp_desync",
    "stopped": "hang_stopped",
    "driver_spin": "hang_asymmetric",
    "long_prefill": "slow_not_hung",
    "crash_loop": "crash_loop",
    "cut_traceback": "crash",
}


@pytest.mark.parametrize(("case", "expected"), EXPECTED.items())
def test_a_recorded_case_gets_its_verdict(case: str, expected: str) -> None:
    verdict = casefolder.judge(CASES / case)
    assert verdict.verdict == expected, verdict.to_json()
    assert verdict.evidence and all(item.text and item.cite.artefact for item in verdict.evidence)


@pytest.mark.parametrize("case", ["100", "102", "103", "012", "108", "030", "104", "106", "005", "001"])
def test_the_shared_cases_get_theirs(case: str) -> None:
    folders = list(SHARED.glob(f"{case}-*")) if SHARED.is_dir() else []
    if not folders:
        pytest.skip("the shared cases are not beside this checkout")
    wanted = re.findall(r"^(?:verdict|acceptable): (.*)$", (folders[0] / "case.yaml").read_text(), re.MULTILINE)
    verdict = casefolder.judge(folders[0])
    assert re.search(rf"\b{verdict.verdict.value}\b", " ".join(wanted)), (verdict.to_json(), wanted)


@pytest.mark.parametrize("case", ["grammar_barrier", "host_callback", "tp_desync", "driver_spin"])
def test_moved_lines_other_pids_and_renumbered_ranks_do_not_change_the_verdict(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(CASES / case, folder)
    stacks = sorted(folder.glob("pyspy-*.txt"))
    texts = [re.sub(r"\.py:(\d+)\)", lambda m: f".py:{int(m[1]) + 413})", path.read_text()) for path in stacks]
    for path, text in zip(stacks, reversed(texts), strict=True):
        path.write_text(re.sub(r"\b(Process|Thread) (\d+)", lambda m: f"{m[1]} {int(m[2]) + 70000}", text))
    assert casefolder.judge(folder).verdict == EXPECTED[case]


def test_the_suspect_is_the_odd_rank_and_not_the_majority() -> None:
    assert all("rank 0" in who for who in casefolder.judge(CASES / "driver_spin").suspects)
    assert {who.split()[1] for who in casefolder.judge(CASES / "host_callback").suspects} == {"2", "3"}


def test_the_evidence_cites_lines_that_say_it() -> None:
    for item in casefolder.judge(CASES / "stopped").evidence:
        if item.cite.line:
            assert (CASES / "stopped" / item.cite.artefact).read_text().splitlines()[item.cite.line - 1].strip()
    first = casefolder.judge(CASES / "stopped").evidence[0]
    assert "stopped" in first.text and (first.cite.artefact, first.cite.line) == ("ps.txt", 4)


def test_a_cut_traceback_is_called_cut_and_a_whole_one_is_given_with_type_and_message() -> None:
    cut = casefolder.judge(CASES / "cut_traceback")
    assert any("cut" in gap.reason for gap in cut.missing)
    whole = casefolder.judge(CASES / "crash_loop")
    assert any("TypeError: Worker.forward()" in item.text for item in whole.evidence)
    assert not any("CancelledError" in item.text for item in whole.evidence)


def test_an_exception_of_an_earlier_life_is_not_the_reason_of_this_end(tmp_path: Path) -> None:
    ready, old = "Ready: configuration abc\n", "Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nKeyError: 'old'\n"
    (tmp_path / "ps.txt").write_text("PID PPID STAT RANK COMMAND\n5 1 gone 0 lastbatch::scheduler_TP0\n")
    (tmp_path / "server.log").write_text(ready + old + ready + "Ending: rank 0 (pid 5) ended with signal SIGKILL\n")
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict == "crash" and not any("old" in item.text for item in verdict.evidence), verdict.to_json()
    (tmp_path / "server.log").write_text(ready + old)
    assert any("old" in item.text for item in casefolder.judge(tmp_path).evidence)


def test_less_evidence_makes_less_sure_and_names_the_gap(tmp_path: Path) -> None:
    folder = tmp_path / "less"
    shutil.copytree(CASES / "grammar_barrier", folder)
    for path in (*folder.glob("pyspy-*"), folder / "health.txt"):
        path.unlink()
    before, after = casefolder.judge(CASES / "grammar_barrier"), casefolder.judge(folder)
    assert after.verdict == "hang_symmetric_spin" and after.confidence < before.confidence
    assert "stacks" in {gap.what for gap in after.missing}


def test_files_that_cannot_be_read_are_listed_and_not_fatal(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(CASES / "stopped", folder)
    (folder / "rank-0.box").write_bytes(b"no box")
    (folder / "pyspy-3.json").write_text("{cut")
    (folder / "diary.txt").write_text("dear diary\n")
    (folder / "server.log").write_bytes(b"\xff\xfe\x00" + (CASES / "stopped/server.log").read_bytes())
    verdict = casefolder.judge(folder)
    assert verdict.verdict == "hang_stopped"
    assert {"rank-0.box", "pyspy-3.json", "diary.txt"} <= {gap.what for gap in verdict.missing}


def test_replay_prints_the_verdict_object_and_its_exit_code_says_what_was_found() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["replay", str(CASES / "tp_desync"), "--json"])
    raw = json.loads(done.stdout)
    assert done.exit_code == ExitCode.DONE
    assert set(raw) == {"verdict", "confidence", "evidence", "missing", "suspects", "runbook"}
    assert raw["verdict"] == "hang_tp_desync" and raw["runbook"] == "runbooks/hang_tp_desync.md"
    assert set(raw["evidence"][0]) == {"for", "text", "artefact", "line"} and set(raw["missing"][0]) == {"what", "reason"}
    assert Verdict.from_json(raw).to_json() == raw
    assert runner.invoke(app, ["replay", str(CASES / "tp_desync"), "--fail-on-verdict"]).exit_code == ExitCode.FOUND
    assert runner.invoke(app, ["replay", str(CASES / "long_prefill"), "--fail-on-verdict"]).exit_code == ExitCode.DONE
    missing = runner.invoke(app, ["replay", str(CASES / "nothing")])
    assert missing.exit_code == ExitCode.USAGE and "no such folder" in missing.stderr


def test_a_folder_in_which_nothing_is_known_is_a_usage_error_that_says_what_is(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_bytes(b"PK")
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == ExitCode.USAGE and "notes.docx" in done.stderr and "server.log" in done.stderr


def test_evidence_that_was_changed_since_the_capture_is_said_to_be(tmp_path: Path) -> None:
    writer = manifest.Writer(tmp_path, "small", "wedge")
    writer.add("health.txt", b"GET /health 200 0.002 s\n", probe="health", start="")
    writer.add("ps.txt", b"PID COMMAND\n1 init\n", probe="process", start="")
    writer.conclude("healthy")
    clean = {gap.what for gap in casefolder.judge(writer.folder).missing}
    assert "evidence as it was captured" not in clean
    (writer.folder / "health.txt").write_text("GET /health 503 0.002 s\n")
    (gap,) = [gap for gap in casefolder.judge(writer.folder).missing if gap.what == "evidence as it was captured"]
    assert gap.reason.startswith("health.txt: SHA-256") and "changed since the capture" in gap.reason
    assert "changed since the capture" in CliRunner().invoke(app, ["replay", str(writer.folder)]).stdout


def test_a_log_in_which_the_word_process_stands_and_no_dump_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("INFO: Started server process [7]\nProcess finished\n")
    assert "server.log" not in {gap.what for gap in casefolder.judge(tmp_path).missing}


def test_a_verdict_that_no_process_had_a_word_in_knows_that_it_is_blind(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(json.dumps({"stalled_s": 40.0}))
    (tmp_path / "gpu.csv").write_text("node,index,util,mem_util,power_w,limit_w\na,0,0,0,60,700\na,1,0,0,60,700\n")
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict is Class.hang_control_plane and verdict.blind, verdict.to_json()
    assert "blind" not in verdict.to_json()


def test_no_rule_names_a_fault_or_a_case() -> None:
    words = ("collective.skip", "verify_desync", "callback.stall", "decode.crash", "health.lie", "case.yaml")
    rules = [str(signature) for signature in SIGNATURES]
    rules += [path.read_text() for path in (Path(casefolder.__file__).parent / "engines").glob("*.toml")]
    assert not [word for word in words for rule in rules if word in rule]


def test_every_class_of_the_contract_exists_and_only_alarms_page() -> None:
    assert len(Class) == 20
    assert {c.value for c in Class if not c.is_alarm} == {"slow_not_hung", "loading_not_hung", "idle_not_hung", "healthy"}


def test_a_folder_that_is_none_of_ours_is_refused_and_a_single_rank_is_not_called_all(tmp_path: Path) -> None:
    (tmp_path / "systemd.md").write_text("# How to\n")
    (tmp_path / "results.json").write_text("{}")
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == ExitCode.USAGE and "no bundle or case here" in done.output
    shutil.copy(CASES / "grammar_barrier/pyspy-0.txt", tmp_path)
    texts = [item.text for item in casefolder.judge(tmp_path).evidence]
    assert any("the only rank" in text for text in texts) and not any("all 1 " in text for text in texts), texts


def test_a_traceback_is_fenced_in_what_goes_to_a_ticket() -> None:
    (item,) = [item for item in casefolder.judge(CASES / "crash_loop").evidence if "Traceback" in item.text]
    told = render._told(item).splitlines()
    assert told[0].startswith("traceback: TypeError") and told[0].endswith("`]")
    assert told[2] == "  ```text" and told[3] == "  Traceback (most recent call last):" and told[-1] == "  ```"


def test_the_bundled_engines_local_times_are_in_utc_where_the_bundle_says_its_nodes_zone(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("[2026-03-02 10:00:00] lastbatch: Ready: configuration abc, invocation 1234\n")
    (assumed,) = casefolder.read(tmp_path).logs
    item = {"path": "server.log", "node": "a", "rank": None, "probe": "log", "outcome": "taken", "reason": ""}
    (tmp_path / "manifest.json").write_text(json.dumps({"items": [item], "clocks": {"a": {"zone_s": 7200}}}))
    (known,) = casefolder.read(tmp_path).logs
    assert "zone assumed" in str(assumed.last) and str(known.last) == "2026-03-02 08:00:00 UTC"
    assert str(known.notices[0].moment) == str(known.last)
