"""`opsctl repro`: experiments against a small real server that wedges, refuses or lapses as the incident's did."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from engine.blackbox import BatchKind, Event, EventKind, RequestFlag
from opsctl import cli
from opsctl.playbooks import lint
from opsctl.repro import conclusion, overlap
from opsctl.repro import run as running
from opsctl.repro.conclusion import Outcome, Run
from opsctl.repro.context import Context
from opsctl.repro.experiment import Experiment
from opsctl.repro.overlap import Batches, Measured
from opsctl.repro.run import NotSteady, Site, repeat
from opsctl.repro.watch import brought
from tests.opsctl.site import Ran
from tests.opsctl.stream_server import streaming

HEAD = """name: repro-x
kind: experiment
summary: small
hypothesis:
  - probe: answer
method:
  - name: replica
    deadline_s: 60
    repro:
"""
SMALL = """
      runs: 2
      seconds: 20
      agents: {streams: 2, max_tokens: 40, context_tokens: 400}
      probes: {constrained: true, max_tokens: 8, most: 12, expect: json}
      overlap: {share: 0.4, agents: 1}
      stall_s: 3
      counts: 5
"""


def repro(folder: Path, server: Any, text: str = SMALL, *more: str) -> Ran:
    (folder / "repro-x.yaml").write_text(HEAD + text)
    out, err = io.StringIO(), io.StringIO()
    env = {"PATH": "/usr/bin:/bin", "OPSCTL_PLAYBOOKS": str(folder)}
    code = cli.main(["repro", "run", "X", "--url", server.url, "--json", *more], env, stdin=io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


def test_a_fault_that_comes_is_exit_9_with_the_seconds_after_the_request_that_brought_it(tmp_path: Path) -> None:
    with streaming(wedges=True) as server:
        ran = repro(tmp_path, server)
    assert ran.code == 9, ran.err
    assert ran.data["outcome"] == "reproduced" and len(ran.data["runs"]) == 1
    (run,) = ran.data["runs"]
    assert "no stream has given anything" in run["fault"] and 0 <= run["after_s"] < 10
    assert (
        ran.data["sentence"].startswith("The fault reproduced in 1 of 1 runs that count, 0")
        and "is 21% to 100% a run" in ran.data["sentence"]
    )


def test_the_same_load_without_the_constraint_is_not_reproduced_with_its_interval(tmp_path: Path) -> None:
    with streaming(wedges=True) as server:
        ran = repro(tmp_path, server, SMALL.replace("constrained: true", "constrained: false").replace("expect: json", "expect: text"))
    assert ran.code == 0, ran.err
    run = ran.data["runs"][0]
    assert run["overlap"]["source"] == "stream timings" and run["overlap"]["share"] > 0.4
    assert run["expected"] == run["probes"] == 12 and run["turns"] > 2
    assert "Not reproduced in 2 of 2 runs" in ran.data["sentence"] and "up to 66% a run" in ran.data["sentence"]
    assert "24 of 24 requests answered, up to 13.8% a request" in ran.data["sentence"]


def test_a_run_whose_concurrency_lapsed_is_inconclusive_and_never_passed(tmp_path: Path) -> None:
    with streaming(token_s=0.01, lapses=3) as server:  # the loop's first turns are answered, and no later one
        slow = SMALL.replace("most: 12", "most: 60").replace("runs: 2", "runs: 1")
        ran = repro(tmp_path, server, slow)
    assert ran.code == 5, ran.out
    assert ran.data["outcome"] == "inconclusive" and "concurrency lapsed" in ran.data["sentence"]
    assert ran.data["runs"][0]["turn_errors"].keys() == {"http 503"}


def test_refusals_are_timed_beside_long_prefills_and_the_loop_goes_on(tmp_path: Path) -> None:
    text = SMALL.replace("expect: json", "expect: http 400, every_s: 0.05").replace("runs: 2", "runs: 1")
    text += "      prefills: {streams: 1, prompt_tokens: 300}\n"
    with streaming(refuses=True) as server:
        ran = repro(tmp_path, server, text)
        failed = repro(tmp_path, server, text.replace("http 400", "http 422"))
    assert ran.code == 0, ran.out
    run = ran.data["runs"][0]
    assert run["expected"] == 12 and run["refusals"]["count"] == 12 and run["turn_errors"] == {}
    assert 0 < run["refusals"]["p50_s"] <= run["refusals"]["p99_s"] <= run["refusals"]["max_s"] < 10
    assert run["refusals_beside_prefill"]["count"] > 0 and run["prefills"] > 0
    assert "12 of 12 requests refused" in ran.data["sentence"]
    assert failed.code == 9 and failed.data["outcome"] == "failed" and "12 http 400" in failed.data["sentence"]


def test_a_server_that_goes_in_the_midst_is_the_fault_and_one_that_is_not_there_is_exit_7(tmp_path: Path) -> None:
    with streaming() as server:
        dies = repro(tmp_path, server, SMALL.replace("max_tokens: 8", "max_tokens: 8, body: {trouble: cut}"))
    assert dies.code == 9 and dies.data["outcome"] in ("reproduced", "failed")
    gone = repro(tmp_path, server)
    assert gone.code == 7


def test_a_server_that_does_not_serve_before_the_experiment_is_no_reproduction(tmp_path: Path) -> None:
    with streaming(lapses=0) as server:
        ran = repro(tmp_path, server)
    assert ran.code == 5 and ran.errors[0]["code"] == "not steady" and "http 503" in ran.errors[0]["message"]


def test_a_playbook_runs_its_experiment_as_a_step_and_keeps_what_it_found(tmp_path: Path) -> None:
    with streaming() as server:
        folder = tmp_path / "playbooks"
        folder.mkdir()
        (folder / "repro-x.yaml").write_text(HEAD + SMALL.replace("runs: 2", "runs: 1"))
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(f'[deployment.d]\nengine = "generic"\napi = "{server.url}"\n[[deployment.d.node]]\nname = "a"\n')
        out, err = io.StringIO(), io.StringIO()
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        words = ["playbook", "run", "repro-x", "--fleet", str(fleet), "--yes", "--json"]
        code = cli.main(words, env, stdin=io.StringIO(), stdout=out, stderr=err)
    assert code == 0, (out.getvalue(), err.getvalue())
    (step,) = Ran(int(code), out.getvalue(), "").data["method"]
    assert step["action"] == "repro" and step["exit_code"] == 0 and "Not reproduced in 1 of 1 runs" in step["said"]


def test_the_loop_grows_and_is_trimmed_below_the_limit_so_that_no_turn_is_refused(tmp_path: Path) -> None:
    with streaming(context=400) as server:
        ran = repro(
            tmp_path, server, SMALL.replace("most: 12", "most: 1000").replace("seconds: 20", "seconds: 3").replace("runs: 2", "runs: 1")
        )
        longest = server.longest
    run = ran.data["runs"][0]
    assert run["turn_errors"] == {} and run["turns"] >= 6, run
    assert 200 < longest == run["most_context"] <= 400 - 40


def test_a_context_is_cut_from_its_oldest_end_and_shrinks_when_the_server_refuses_it_all_the_same() -> None:
    context = Context(limit=300, max_tokens=50)
    lengths = []
    for _ in range(30):
        asked = context.ask()
        words = sum(len(m["content"].split()) for m in asked)
        lengths.append(2 * words)
        context.answered("word " * 20, 2 * words)
    assert max(lengths) <= 250 and lengths[-1] > 100  # it is used, not only obeyed
    assert asked[0]["role"] == "system" and asked[-1]["content"].startswith("Step 30")
    before = len(context.ask())
    context.refused()
    assert len(context.ask()) < before


def test_overlap_is_the_share_of_the_suspects_time_in_which_enough_others_decode() -> None:
    agents = [(0.0, 4.0), (3.0, 10.0)]
    assert overlap.by_streams([(2.0, 6.0)], agents, 1).share == pytest.approx(1.0)
    assert overlap.by_streams([(2.0, 6.0)], agents, 2).share == pytest.approx(0.25)
    assert overlap.by_streams([(9.0, 11.0), (20.0, 21.0)], agents, 1).share == pytest.approx(1 / 3)
    assert overlap.by_streams([], agents, 1).share is None


def ring(*batches: tuple[BatchKind, int, int], first: int = 0) -> list[Event]:
    """Events of batches with so many grammar-masked and so many other requests."""
    found: list[Event] = []

    def add(kind: EventKind, sub: int = 0, flags: int = 0) -> None:
        found.append(Event(first + len(found), 0, kind, sub, flags, 0, 0, 0, 0))

    for kind, masked, others in batches:
        add(EventKind.batch_begin, kind, masked + others)
        for flags in [RequestFlag.grammar] * masked + [RequestFlag(0)] * others:
            add(EventKind.batch_request, flags=flags)
        add(EventKind.batch_end, kind)
    return found


def test_the_black_box_says_which_batches_were_shared_and_each_is_counted_once() -> None:
    decode, verify, prefill = BatchKind.decode, BatchKind.verify, BatchKind.prefill
    batches = Batches(needed=2)
    events = ring((verify, 1, 2), (decode, 1, 1), (decode, 0, 3), (prefill, 1, 2), (decode, 2, 2))
    batches.take(events[:6])
    batches.take(events)
    assert (batches.masked, batches.shared, batches.lost) == (3, 2, False)
    assert batches.measured() == Measured(2 / 3, 3.0, "batches", "black box")
    later = Batches(needed=2)
    later.skip(events)
    later.take([*events, *ring((decode, 1, 3), first=len(events))])
    assert later.measured() == Measured(1.0, 1.0, "batches", "black box")
    batches.take(ring((decode, 1, 2), first=9000))
    assert batches.lost and batches.masked == 4


@pytest.mark.parametrize(
    ("held", "ended", "begun"),
    [
        ([90.0, 99.0], [99.5], 99.0),  # the last that was open
        ([100.004], [95.0], 100.004),  # it began after the last part came, and before the next was due
        ([99.0, 100.004], [], 99.0),
        ([103.0], [95.0], 95.0),  # asked when the server was silent already
        ([103.0], [], None),
    ],
)
def test_a_silence_is_laid_to_the_request_that_was_there_when_it_began(held: list[float], ended: list[float], begun: float | None) -> None:
    assert brought(held, ended, silence_s=100.0) == begun


def made(**more: Any) -> Run:
    return Run(**{"seconds": 60.0, "turns": 9, "turn_errors": {}, "probes": 20, "expected": 20, "probe_errors": {},
                  "overlap": Measured(0.9, 30.0, "seconds", "stream timings"), **more})  # fmt: skip


def test_each_run_says_what_its_counts_support_and_no_more() -> None:
    experiment = Experiment(seconds=60, overlap={"share": 0.8}, counts=10)  # type: ignore[arg-type]
    assert conclusion.outcome(experiment, made())[0] is Outcome.not_reproduced
    assert conclusion.outcome(experiment, made(overlap=Measured(0.79, 30.0, "seconds", "black box")))[0] is Outcome.inconclusive
    assert conclusion.outcome(experiment, made(overlap=Measured(None, 0.0, "batches", "black box")))[0] is Outcome.inconclusive
    assert conclusion.outcome(experiment, made(probes=9, expected=9))[0] is Outcome.inconclusive
    assert conclusion.outcome(experiment, made(turns=0))[0] is Outcome.inconclusive
    assert conclusion.outcome(experiment, made(expected=19, probe_errors={"invalid JSON": 1}))[0] is Outcome.failed
    hit = made(fault="wedged", after_s=31.0, overlap=Measured(0.1, 1.0, "seconds", "black box"))
    assert conclusion.outcome(experiment, hit)[0] is Outcome.reproduced
    lapsed = made(overlap=Measured(0.2, 30.0, "seconds", "black box"))
    told, said = conclusion.conclude(experiment, [lapsed, made(), hit])
    assert told is Outcome.reproduced and "1 of 2 runs that count, 31.0 s after" in said and "1 further runs do not count" in said
    assert conclusion.conclude(experiment, [made(), lapsed])[0] is Outcome.inconclusive
    assert conclusion.conclude(experiment, [])[0] is Outcome.inconclusive


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SMALL.replace("agents: 1}", "agents: 3}"), "overlap.agents: 3 must decode at once, and agents.streams is 2"),
        (SMALL.replace("counts: 5", "counts: 50"), "counts: 50 probes are needed and probes.most is 12"),
        (SMALL.replace("expect: json", "expect: jsn"), "expect"),
        (SMALL.replace("seconds: 20", "second: 20"), 'did you mean "seconds"?'),
    ],
)
def test_a_wrong_experiment_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "repro-x.yaml"
    path.write_text(HEAD + text)
    problems = lint.problems(path)
    assert any(says in problem.text for problem in problems), problems
    assert all(problem.line >= 9 for problem in problems)


def test_the_five_experiments_of_the_incident_are_listed_shown_and_clean() -> None:
    out = io.StringIO()
    assert cli.main(["repro", "list"], {"PATH": "/usr/bin"}, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 0
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["A", "B", "C", "P", "S"]
    for letter in "CABSP":
        shown = io.StringIO()
        assert cli.main(["repro", "show", letter], {"PATH": "/usr/bin"}, stdin=io.StringIO(), stdout=shown, stderr=io.StringIO()) == 0
        assert "the fault: held work that gives nothing" in shown.getvalue()
    packaged = Path(__file__).parents[2] / "playbooks"
    assert [lint.problems(packaged / f"repro-{letter}.yaml") for letter in "abcps"] == [[]] * 5


def test_a_server_that_goes_away_between_two_runs_costs_not_the_first_ones_result(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = iter((True,))

    async def run(experiment: Experiment, site: Site, seed: int, say: Any) -> Run:
        if not next(steady, False):
            raise NotSteady("a plain request came to: http 503")
        return made()

    monkeypatch.setattr(running, "run", run)
    experiment = Experiment.model_validate({"runs": 3, "seconds": 1, "overlap": {"share": 0}})
    found, broke = asyncio.run(repeat(experiment, Site("http://127.0.0.1:9"), 0, lambda text: None))
    assert len(found) == 1 and "503" in str(broke)
