"""Every recorded case gets its verdict by general rules, and keeps it when nothing but names, lines and clocks change."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from monitors import casefolder, scoreboard
from monitors.cli import app
from monitors.exit_codes import ExitCode
from monitors.judge.signatures import SIGNATURES
from monitors.judge.verdict import Class

CASES = Path(__file__).parent / "cases"
SHARED = Path(__file__).parents[3] / "shared/cases"
FOLDERS = sorted(path.parent for root in (CASES, SHARED) if root.is_dir() for path in root.glob("*/case.yaml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name[:40])
def test_a_case_gets_its_verdict_and_says_what_it_owes(folder: Path) -> None:
    row = scoreboard.judge(folder)
    assert row.passed, (row.wanted, row.unsaid, row.found.to_json())
    assert all(item.text and item.cite.artefact for item in row.found.evidence)
    for item in row.found.evidence:
        path = folder / item.cite.artefact
        assert not item.cite.line or (path.exists() and item.cite.line <= len(path.read_text(errors="replace").splitlines()))


def test_the_cases_show_every_class() -> None:
    assert {scoreboard.expectation(path).verdict for path in CASES.glob("*/case.yaml")} == set(Class)


_TIMES = (
    (re.compile(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d:\d\d"), "%Y-%m-%d{0}%H:%M:%S"),
    (re.compile(r"(?<=INFO |EBUG |RROR |NING )\d\d-\d\d( )\d\d:\d\d:\d\d"), "%m-%d{0}%H:%M:%S"),
    (re.compile(r"\d{4}/\d\d/\d\d( )\d\d:\d\d:\d\d"), "%Y/%m/%d{0}%H:%M:%S"),
)


def _later(text: str, days: int) -> str:
    """All clocks moved by the same number of days and some hours."""
    for pattern, form in _TIMES:

        def moved(match: re.Match[str], form: str = form) -> str:
            shape = form.format(match[1])
            year = "" if "%Y" in shape else "2026-"
            try:
                at = dt.datetime.strptime(year + match[0], ("%Y-" if year else "") + shape)
            except ValueError:
                return match[0]
            return (at + dt.timedelta(days=days, hours=3)).strftime(shape)

        text = pattern.sub(moved, text)
    return text


def _other_names(text: str) -> str:
    """Line numbers of code, process numbers and addresses changed throughout."""
    text = re.sub(r"\.(py|cu|cc|rs|cpp):(\d+)", lambda m: f".{m[1]}:{int(m[2]) + 217}", text)
    text = re.sub(r'(\.py", line )(\d+)', lambda m: f"{m[1]}{int(m[2]) + 217}", text)
    text = re.sub(r"\b(Process|Thread|pid=|PID |LWP )(\s?)(\d{2,})\b", lambda m: f"{m[1]}{m[2]}{int(m[3]) + 31000}", text)
    text = re.sub(r"192\.0\.2\.\d+|127\.0\.0\.1|172\.\d+\.\d+\.\d+", "198.51.100.7", text)
    return re.sub(r"\bnode-(\w)\b|\bhost-a\b", "rack9-blade4", text)


def _renumbered(folder: Path, target: Path) -> None:
    """The same evidence with the ranks counted the other way round, in names of files and in titles."""
    ranks = sorted({int(m[1]) for path in folder.iterdir() if (m := re.match(r"pyspy-(\d+)\.", path.name))})
    other = dict(zip(ranks, reversed(ranks), strict=True))
    for path in folder.iterdir():
        name = re.sub(r"^(pyspy|gdb)-(\d+)\.", lambda m: f"{m[1]}-{other.get(int(m[2]), int(m[2]))}.", path.name)
        text = path.read_text(errors="replace")
        if name != path.name:
            text = re.sub(r"_(TP|EP)(\d+)", lambda m: f"_{m[1]}{other.get(int(m[2]), int(m[2]))}", text, count=2)
        (target / name).write_text(text)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name[:40])
def test_moved_lines_clocks_and_names_do_not_change_a_verdict(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "any-name"
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "case.yaml":
            (target / path.name).write_text(_later(_other_names(path.read_text(errors="replace")), 41))
    assert casefolder.judge(target).verdict == casefolder.judge(folder).verdict


@pytest.mark.parametrize(
    "folder", [folder for folder in FOLDERS if len(list(folder.glob("pyspy-[0-9]*"))) > 1], ids=lambda folder: folder.name[:40]
)
def test_renumbered_ranks_do_not_change_a_verdict(folder: Path, tmp_path: Path) -> None:
    _renumbered(folder, tmp_path)
    assert casefolder.judge(tmp_path).verdict == casefolder.judge(folder).verdict


def test_what_is_expected_is_never_read_for_a_verdict(tmp_path: Path) -> None:
    shutil.copytree(CASES / "stopped", tmp_path / "x")
    (tmp_path / "x/case.yaml").write_text("verdict: idle_not_hung\n")
    assert casefolder.judge(tmp_path / "x").verdict is Class.hang_stopped


def test_replay_of_all_prints_a_table_and_fails_when_one_case_does(tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["replay", "--all", str(CASES)])
    assert done.exit_code == ExitCode.DONE and "precision" not in done.stderr and "prec" in done.stdout, done.stdout
    shutil.copytree(CASES / "stopped", tmp_path / "one")
    (tmp_path / "one/case.yaml").write_text('verdict: hang_stopped\nmust_say: ["a word that is nowhere"]\n')
    failed = runner.invoke(app, ["replay", "--all", str(tmp_path), "--json"])
    assert failed.exit_code == ExitCode.FOUND and json.loads(failed.stdout)[0]["unsaid"] == ["a word that is nowhere"]
    (tmp_path / "one/case.yaml").write_text("verdict: hang_stoped\n")
    wrong = runner.invoke(app, ["replay", "--all", str(tmp_path)])
    assert wrong.exit_code == ExitCode.USAGE and "case.yaml" in wrong.stderr
    assert runner.invoke(app, ["replay"]).exit_code == ExitCode.USAGE
    assert runner.invoke(app, ["replay", "--all", str(tmp_path / "nothing")]).exit_code == ExitCode.USAGE


def test_a_case_that_cannot_be_decided_is_passed_by_doubt_and_failed_by_certainty(tmp_path: Path) -> None:
    shutil.copytree(CASES / "stopped", tmp_path / "x")
    (tmp_path / "x/case.yaml").write_text("verdict: hang_stopped\nscore: false\n")
    assert not scoreboard.judge(tmp_path / "x").passed
    assert scoreboard.judge(CASES / "only_hot_gpus").passed


def test_precision_and_recall_count_what_was_said_and_what_was_there() -> None:
    rows = scoreboard.run(CASES)
    wrong = scoreboard.Row("x", scoreboard.Expectation(Class.oom), rows[0].found, ())
    stopped = {one.name: one for one in scoreboard.figures([*rows, wrong], strict=True)}
    assert stopped["oom"].right == stopped["oom"].there - 1


def test_no_rule_names_a_version_a_date_or_a_case() -> None:
    rules = [str(signature) for signature in SIGNATURES]
    for path in sorted(Path(casefolder.__file__).parent.glob("engines/*.toml")):
        rules += [line for line in path.read_text().splitlines() if not line.startswith("#")]
    shown = {"(?P<", "%d"}
    dated = re.compile(r"\b20[12]\d-\d\d\b|\b\d+\.\d+\.\d+\b|\bcase\b")
    assert not [rule for rule in rules if dated.search(rule) and not any(word in rule for word in shown)]


def test_every_finding_that_a_signature_names_is_made_somewhere() -> None:
    made = "".join(path.read_text() for path in Path(casefolder.__file__).parent.glob("judge/*.py"))
    made += "".join(path.read_text() for path in Path(casefolder.__file__).parent.glob("engines/dialect.py"))
    named = {name for one in SIGNATURES for group in (*one.needs, one.unless, one.supports, one.against) for name in group}
    assert not [name for name in sorted(named) if f'"{name}"' not in made]


def test_the_majority_is_told_as_the_scene_and_the_odd_ranks_as_suspects(tmp_path: Path) -> None:
    waiting = ("all_reduce (torch/distributed/distributed_c10d.py:9)", "forward (model.py:2)", "run_batch (sglang/srt/scheduler.py:8)")
    for rank in range(5):
        place = ("recv_requests (sglang/srt/managers/scheduler.py:4)",) if rank == 3 else waiting
        text = f'Process {rank + 10}: sglang::scheduler_TP{rank}\n\nThread {rank + 10} (active): "MainThread"\n'
        (tmp_path / f"pyspy-{rank}.txt").write_text(text + "".join(f"    {frame}\n" for frame in place))
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict is Class.hang_tp_desync and [who.split(":")[0] for who in verdict.suspects] == ["rank 3"]
    assert any("4 of 5 (ranks 0, 1, 2, 4)" in e.text and "1 of 5 (rank 3)" in e.text for e in verdict.evidence)
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("recv_requests (sglang/srt/managers/scheduler.py:4)", "make_ptx (triton/compiler.py:3)"))
    assert casefolder.judge(tmp_path).verdict is Class.hang_asymmetric


def test_an_assumed_zone_is_told_with_every_time(tmp_path: Path) -> None:
    line = "Decode batch, #running-req: 2, #token: 9, token usage: 0.10, gen throughput (token/s): 5.0, #queue-req: 0\n"
    (tmp_path / "server.log").write_text("".join(f"[2026-03-02 10:00:0{i} TP0] {line}" for i in range(3)))
    assert any("10:00:02 UTC (zone assumed)" in e.text for e in casefolder.judge(tmp_path).evidence)
    (tmp_path / "server.log").write_text("".join(f"2026-03-02T09:00:0{i}+01:00 [2026-03-02 09:00:0{i} TP0] {line}" for i in range(3)))
    assert any("08:00:02 UTC)" in e.text for e in casefolder.judge(tmp_path).evidence)
