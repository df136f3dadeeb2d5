"""`opsctl triage` on every recorded case, and on live deployments of real processes, within its deadline."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import Settings
from monitors import casefolder, engines
from monitors.capture import bundle
from monitors.judge.classify import classify
from opsctl import cli
from opsctl.triage import flags, picture, recent, render
from opsctl.triage.faults import Question
from opsctl.triage.flags import DEFAULT
from opsctl.triage.together import Late, together
from tests.monitors.cluster import HEALTHY, Cluster, fleet_text, web
from tests.opsctl.site import Ran, Site, wait_until
from tests.ports import free_port

CASES = sorted(path.parent for path in (Path(__file__).parents[1] / "monitors/cases").glob("*/case.yaml"))
SHARED = sorted(path.parent for path in (Path(__file__).parents[3] / "shared/cases").glob("*/case.yaml"))


def triage(*args: Any, env: dict[str, str] | None = None) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    code = cli.main(["triage", *map(str, args)], env or dict(os.environ), stdin=io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


@dataclass
class Looked:
    """One triage of a wedged deployment of three real ranks, beside a node that never answers."""

    ran: Ran
    seconds: float
    folder: Path


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    folder = tmp_path_factory.mktemp("triage")
    silent = '[[deployment.small.node]]\nname = "b"\nssh = "-o ProxyCommand=\'sleep 60\' nowhere"\n'
    service = '[[deployment.small.node.service]]\nunit = "x"\nlog = "/x.log"\nrun_dir = "/x"\n'
    with web(HEALTHY) as server, Cluster(folder) as cluster:
        cluster.wedge("grammar")
        earlier = folder / "bundles" / "earlier"
        earlier.mkdir(parents=True)
        head = {"schema": "lastbatch.bundle/1", "deployment": "small", "reason": "corruption", "verdict": "health_lies", "items": []}
        (earlier / "manifest.json").write_text(json.dumps({**head, "created_utc": bundle.utc()}))
        (earlier / "progress.json").write_text(json.dumps({"canary": {"recorded": "a", "under_load": ["b", "c", "a"]}}))
        text = fleet_text([("a", cluster.run_dir, cluster.log)], server.url, more=f'bundle_dir = "{folder}/bundles"')
        (folder / "fleet.toml").write_text(text + silent + service)
        began = time.monotonic()
        ran = triage("--fleet", folder / "fleet.toml", "--save", folder / "kept", "--json", "--fail-on-verdict")
        return Looked(ran, time.monotonic() - began, folder)


def test_every_recorded_case_is_told_within_the_deadline_and_by_the_judges_own_verdict() -> None:
    for folder in (*CASES, *SHARED):
        began = time.monotonic()
        found = picture.of_folder(folder)
        text = render.text(found)
        assert time.monotonic() - began < 10.0, folder
        assert found.scene is not None
        verdict = classify(found.scene)
        assert found.faults[0].verdict.verdict is verdict.verdict, folder
        assert verdict.verdict.value in text or "cannot be told" in text, folder
        assert verdict.runbook in text or not found.faults[0].told


def test_a_folder_is_triaged_from_the_command_line_and_an_alarm_is_exit_9_if_so_asked() -> None:
    folder = next(case for case in CASES if case.name == "grammar_barrier")
    assert "hang_grammar_barrier" in triage(folder).out and triage(folder).code == 0
    found = triage(folder, "--json", "--fail-on-verdict")
    assert found.code == 9 and found.data["faults"][0]["verdict"] == "hang_grammar_barrier"
    assert triage(next(case for case in CASES if case.name == "healthy_flow"), "--fail-on-verdict").code == 0


def test_a_live_wedge_is_told_with_its_ranks_stacks_batches_and_runbook(looked: Looked) -> None:
    assert looked.ran.code == 9, looked.ran.err
    data = looked.ran.data
    assert data["faults"][0]["verdict"] == "hang_grammar_barrier"
    assert data["faults"][0]["runbook"] == "runbooks/hang_grammar_barrier.md"
    assert data["seen"]["state"] == "stalled" and data["seen"]["held"] > 0
    assert {row["rank"] for row in data["ranks"]} == {"0", "1", "2"} and all(row["phase"] for row in data["ranks"])
    main = next(tree for tree in data["stacks"] if tree["thread"] == "MainThread")
    assert main["roots"][0]["ranks"] == ["0", "1", "2"]
    assert 1 < {batch["kind"]: batch["age_s"] for batch in data["batches"]}["decode"] < 60
    assert len(data["gpus"]) == 3 and all(gpu["source"] == "simulated" for gpu in data["gpus"])
    assert any("service" in gap["what"] for gap in data["missing"])  # nothing supervises these ranks, and that is said


def test_a_node_that_never_answers_costs_no_more_than_the_deadline_and_is_named(looked: Looked) -> None:
    assert looked.seconds < 20.0  # ten, and a crowded machine; ssh alone would have waited for minutes
    assert any("node b" in gap["what"] or "node b" in gap["reason"] for gap in looked.ran.data["missing"])


def test_a_wedge_and_a_corruption_of_answers_are_two_faults_with_evidence_of_their_own(looked: Looked) -> None:
    first, second = looked.ran.data["faults"]
    assert (first["verdict"], first["question"]) == ("hang_grammar_barrier", Question.serving)
    assert (second["verdict"], second["question"]) == ("health_lies", Question.answers)
    texts = [{item["text"] for item in fault["evidence"]} for fault in (first, second)]
    assert "2 of the last 3 answers to the seeded canary under load differ from the one at rest" in texts[1] - texts[0]
    assert [one["id"] for one in looked.ran.data["incidents"]] == ["earlier"]


def test_what_was_looked_at_is_kept_as_a_valid_case_and_nowhere_else(looked: Looked) -> None:
    kept = Path(looked.ran.data["saved"])
    assert kept.parent == looked.folder / "kept" and bundle.verify(kept).ok
    assert json.loads((kept / "triage/triage.json").read_text())["faults"] == looked.ran.data["faults"]
    assert casefolder.judge(kept).verdict == "hang_grammar_barrier"
    again = triage(kept, "--json").data
    assert [fault["verdict"] for fault in again["faults"]] == ["hang_grammar_barrier", "health_lies"]
    assert [path.name for path in (looked.folder / "bundles").iterdir()] == ["earlier"]


def test_two_faults_of_a_recorded_scene_are_told_apart() -> None:
    barrier = casefolder.read(next(case for case in CASES if case.name == "grammar_barrier"))
    leak = casefolder.read(next(case for case in CASES if case.name == "markup_in_a_stream"))
    both = dataclasses.replace(barrier, answers=leak.answers)
    found = picture.faults(both)
    assert [fault.verdict.verdict for fault in found] == ["hang_grammar_barrier", "parser_leak"]
    assert found[0].verdict.evidence == classify(barrier).evidence  # the other fault adds nothing to this one, and takes nothing


def test_a_running_service_is_healthy_with_its_flags_and_no_word_of_an_earlier_invocation(make_site: Callable[..., Site]) -> None:
    site = make_site(args=["--crash-after", "2"])
    before = site.services[0].snapshot().invocation_id
    for _ in range(2):
        try:
            site.ask()
        except httpx.HTTPError:
            break
    wait_until(lambda: site.answers() and site.services[0].snapshot().invocation_id != before, what="the restart")
    fleet = site.folder / "fleet.toml"
    fleet.write_text(fleet.read_text().replace("unit = 'node0'", f"unit = 'node0'\nrun_dir = '{site.folder}/boxes/node0'")
                     .replace("'log/node0.log'", f"'{site.folder}/log/node0.log'"))  # fmt: skip
    data = triage("--fleet", fleet, "--deadline", "3", "--json", env=site.env).data
    (row,) = data["services"]
    assert row["state"] == "active" and row["invocation"] != before and row["restarts"] == 1 and row["tracebacks"] == []
    told = {flag["name"]: (flag["state"], flag["text"]) for flag in data["flags"]}
    assert told["tool-call parser"] == ("set", "hermes")
    assert {flag["source"] for flag in data["flags"] if flag["name"] == "tool-call parser"} == {DEFAULT}
    assert told["reasoning parser"] == ("not set", "reasoning stays in the visible answer")
    assert any("TypeError" in line for line in (site.folder / "log/node0.log").read_text().splitlines())

    site.services[0].begin_stop()
    wait_until(lambda: not site.answers(), what="the stop")
    down = triage("--fleet", fleet, "--deadline", "2", "--fail-on-verdict", env=site.env)
    assert down.code == 9 and "DOWN  service node0" in down.out
    assert "start    opsctl service start-group --fleet" in down.out


def test_nothing_that_answers_is_exit_7_and_a_wrong_folder_or_fleet_file_is_exit_2(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'[deployment.d]\nengine = "sglang"\napi = "http://127.0.0.1:{free_port()}"\n[[deployment.d.node]]\nname = "a"\n')
    ran = triage("--fleet", fleet, "--deadline", "2")
    assert ran.code == 7 and "no service, node or route answered" in ran.err
    assert triage(tmp_path / "none").code == 2
    assert triage("--fleet", tmp_path / "none.toml").code == 2


def test_flags_are_told_set_unset_or_unknown_with_what_their_absence_means() -> None:
    scene = casefolder.read(next(case for case in CASES if case.name == "only_hot_gpus"))
    argv = ["python", "-m", "sglang.launch_server", "--model-path=/m", "--reasoning-parser", "deepseek-r1", "--disable_overlap_schedule",
            "--grammar-backend", "none"]  # fmt: skip
    told = {flag.name: flag for flag in flags.flags(scene, [argv])}
    assert (told["reasoning parser"].state, told["reasoning parser"].text) == ("set", "deepseek-r1")
    assert (told["overlap schedule off"].state, told["overlap schedule off"].text) == ("set", "on")
    assert (told["tool-call parser"].state, told["tool-call parser"].text) == (
        "not set",
        "tool calls reach clients as text, markup and all",
    )
    assert {flag.state for flag in flags.flags(scene, [])} == {"unknown"}
    files = {flag.name: flag.state for flag in flags.files("/m", ["config.json", "tokenizer.json"], "")}
    assert files["tokenizer.json"] == "set" and files["chat_template.jinja"] == "not set"
    assert {flag.state for flag in flags.files("", None, "why")} == {"unknown"}
    assert flags.model_folder(tuple(told.values())) == "/m"


def test_what_the_bundled_engine_takes_untold_is_told_as_its_default() -> None:
    scene = dataclasses.replace(casefolder.read(CASES[0]), dialect=engines.load("lastbatch"), boxes={})
    told = {flag.name: flag for flag in flags.flags(scene, [["lastbatch", "serve", "--grammar-backend", "none"]])}
    assert (told["tool-call parser"].text, told["tool-call parser"].source) == ("hermes", DEFAULT)
    assert (told["grammar backend"].text, told["grammar backend"].source) == ("none", "command line")
    settings = Settings().declared()
    for row in flags.table()["flag"]:
        if "default" in row:
            group, name = row["setting"].split(".")
            assert row["default"]["lastbatch"] == str(settings[group][name])


def test_whoever_is_late_is_a_gap_and_holds_nobody() -> None:
    def broken() -> None:
        raise ValueError("no")

    began, gate = time.monotonic(), threading.Event()
    found = together({"quick": lambda: 1, "slow": lambda: gate.wait(60), "broken": broken}, began + 0.3)
    assert time.monotonic() - began < 30.0
    gate.set()
    assert found["quick"] == 1 and isinstance(found["slow"], Late) and isinstance(found["broken"], ValueError)


def test_bundles_of_the_monitor_that_may_not_be_read_are_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(root: Path, deployment: str, since_unix_s: float) -> Any:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(recent, "incidents", forbidden)
    path = tmp_path / "fleet.toml"
    path.write_text(
        '[deployment.d]\nengine = "lastbatch"\napi = "http://127.0.0.1:9"\nservice = "embedded"\n'
        '[[deployment.d.node]]\nname = "a"\n'
        '[[deployment.d.node.service]]\nunit = "d"\nranks = [0]\nlog = "/dev/null"\ncommand = ["true"]\n'
    )
    ran = triage("--fleet", str(path), "--deadline", "2", "--json", env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path)})
    assert ran.code == 0, ran.err
    assert any(gap["what"] == "the monitor's bundles" and "Permission denied" in gap["reason"] for gap in ran.data["missing"])
