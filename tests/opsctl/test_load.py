"""`opsctl load` against a small real server that streams."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from opsctl import cli
from opsctl.load import asked, cell, plot, results, shapes, table
from opsctl.load.cell import Bounds, Level
from opsctl.load.client import Client
from opsctl.load.figures import Spread, percentile, wilson
from opsctl.load.shapes import Mix, Shape, ShapeError
from opsctl.load.summary import summarise
from tests.opsctl.site import Ran
from tests.opsctl.stream_server import StreamServer, streaming
from tests.ports import free_port

SERVER = Path(__file__).parent / "stream_server.py"


def opsctl(*args: Any) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    code = cli.main([str(a) for a in args], {"PATH": "/usr/bin:/bin"}, stdin=io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def server() -> Iterator[StreamServer]:
    with streaming() as made:
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Shapes whose requests are short."""
    path = tmp_path / "small.toml"
    path.write_text('[[shape]]\nname = "small"\nprompt_tokens = 20\nmax_tokens = 8\n')
    return path


def measured(url: str, shape: Shape, level: Level = Level(1), bounds: Bounds = Bounds(1, 10, 10), **client: Any) -> cell.Ran:  # noqa: B008
    async def work() -> cell.Ran:
        async with Client(url, **client) as one:
            await one.find_model()
            return await cell.run(one, Mix((shape,)), level, bounds)

    return asyncio.run(work())


def test_a_stream_gives_first_token_gaps_and_the_counts_that_the_server_tells(server: StreamServer) -> None:
    ran = measured(server.url, Shape(name="s", max_tokens=20, extra={"token_s": 0.01}))
    (answer,) = ran.answers
    assert answer.ok and answer.tokens == 20 and answer.status == 200 and answer.fingerprint == "fp-small"
    assert len(answer.moments_s) == 20 and answer.first_s is not None and answer.first_s >= 0.01
    found = summarise(ran)
    assert 0.01 <= found.gap_s["p50"] < 0.2
    assert found.per_token_s["p50"] == pytest.approx(statistics.mean(answer.gaps_s))
    assert found.tokens_per_s == pytest.approx(20 / ran.wall_s)
    assert 0 < found.client_cpu < 1


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"extra": {"trouble": "cut"}}, "cut stream"),
        ({"extra": {"trouble": "empty"}}, "empty"),
        ({"extra": {"trouble": "empty"}, "stream": False}, "empty"),
        ({"extra": {"trouble": "status:503"}}, "http 503"),
        ({"extra": {"trouble": "garbage"}, "expect": "json"}, "invalid JSON"),
        ({"extra": {"trouble": "deaf"}}, "timeout"),
        ({"expect": "http 400"}, "not refused"),
        ({"expect": "tool_call"}, "no tool call"),
        ({"expect": "json", "max_tokens": 3}, "JSON cut by max_tokens"),
        ({"expect": "json", "response_format": {"type": "json_object"}}, ""),
        ({"expect": "tool_call", "tools": ({"type": "function"},)}, ""),
        ({"route": "completions", "stream": False}, ""),
        ({"expect": "http 503", "extra": {"trouble": "status:503"}}, ""),
    ],
)
def test_each_trouble_is_an_error_of_its_own_kind(server: StreamServer, more: dict[str, Any], kind: str) -> None:
    ran = measured(server.url, Shape(name="s", **{"max_tokens": 4, **more}), deadline_s=0.3 if kind == "timeout" else 10)
    assert [answer.error for answer in ran.answers] == [kind]
    assert summarise(ran).errors == ({kind: 1} if kind else {})


@pytest.mark.parametrize("event", [
    '{"choices": "abc"}', '{"choices": [null]}', '{"choices": [{"delta": "a"}]}', '{"choices": [{"delta": {"content": [1]}}]}',
    '{"choices": [{"delta": {"tool_calls": 5}}]}', '{"usage": {"prompt_tokens": "x"}}', '{"usage": {"completion_tokens": -7}}',
    '{"usage": {"completion_tokens": 1e308}}', '{"system_fingerprint": {"a": 1}}', '[1]', "NaN", "[" * 100_000, '"\\ud800"',
])  # fmt: skip
def test_an_answer_of_an_unknown_form_is_an_error_of_that_answer_alone(event: str) -> None:
    for stream in (True, False):
        body = f"data: {event}\n\ndata: [DONE]\n\n" if stream else event
        came = asked.judge(Shape(name="x", stream=stream), 0.0, 1.0, 200, [(0.5, body.encode())])
        assert came.error in (asked.ODD, asked.INVALID_JSON) and not came.tokens


def test_a_server_that_is_gone_in_the_midst_is_counted_as_no_connection() -> None:
    with streaming() as server:
        client = Client(server.url, model="small")

    async def work() -> cell.Ran:
        async with client:
            return await cell.run(client, Mix((shapes.PLAIN,)), Level(2), Bounds(4, 5, 5))

    assert summarise(asyncio.run(work())).errors == {"connect": 4}


def test_a_closed_loop_keeps_exactly_its_streams_open_and_250_are_no_trouble() -> None:
    with streaming(together=250) as server:
        ran = measured(server.url, Shape(name="s", max_tokens=3), Level(250), Bounds(500, 30, 30))
        assert server.most_open == 250
    assert summarise(ran).ok == 500


def test_an_open_loop_keeps_its_rate_whatever_the_answers_take_and_drops_above_its_bound() -> None:
    with streaming(token_s=0.1) as server:
        ran = measured(server.url, Shape(name="s", max_tokens=3), Level(100, rate=100), Bounds(60, 10, 10))
        assert server.most_open > 10  # a closed loop would have waited
        begun = [answer.begun_s for answer in ran.answers]
        due = list(itertools.islice(cell.poisson(100, 0), 60))
        assert all(late >= at for late, at in zip(begun, due, strict=True))
        bounded = measured(server.url, Shape(name="s", max_tokens=3), Level(2, rate=100), Bounds(30, 10, 10))
    found = summarise(bounded)
    assert found.not_ours["not sent"] > 10 and found.errors == {} and found.ok + found.not_ours["not sent"] == 30


def test_poisson_arrivals_are_those_of_their_seed_and_have_their_rate() -> None:
    first, again, other = (list(itertools.islice(cell.poisson(50, seed), 2000)) for seed in (1, 1, 2))
    assert first == again != other
    gaps = [b - a for a, b in itertools.pairwise(first)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)  # of an exponential: its mean


def test_time_bounds_a_level_and_what_is_open_at_its_end_is_no_fault_of_the_server(server: StreamServer) -> None:
    ran = measured(server.url, Shape(name="s", max_tokens=10_000, extra={"token_s": 0.05}), Level(3), Bounds(1000, 0.2, 0.2))
    assert ran.wall_s < 10
    found = summarise(ran)
    assert found.asked == 3 and found.errors == {} and found.not_ours == {"unfinished": 3} and found.tokens > 0


def test_a_seed_asks_the_same_requests_with_their_shares_and_lengths() -> None:
    short = Shape(name="short", share=3, prompt_tokens=10)
    long = Shape(name="long", prompt_tokens={"kind": "lognormal", "median": 200, "sigma": 0.5, "most": 400})  # type: ignore[arg-type]
    mix = Mix((short, long), seed=5)

    def bodies(mix: Mix) -> list[dict[str, Any]]:
        return [shape.body("m", chance) for shape, chance in map(mix.draw, range(400))]

    assert bodies(mix) == bodies(Mix((short, long), seed=5)) != bodies(Mix((short, long), seed=6))
    counts = [len(body["messages"][-1]["content"].split()) for body in bodies(mix)]
    assert 240 < counts.count(round(10 / shapes.TOKENS_PER_WORD)) < 350
    assert max(counts) == round(400 / shapes.TOKENS_PER_WORD)
    assert len({body["messages"][-1]["content"] for body in bodies(mix)}) == 400


def test_prompt_lengths_are_tokens_as_the_server_counts_them(server: StreamServer) -> None:
    async def work() -> int | None:
        async with Client(server.url, model="small") as client:
            shape = Shape(name="s", prompt_tokens=600, max_tokens=1)
            await client.learn_tokens(shape, random.Random(0))
            return (await client.ask(shape, random.Random(1))).prompt_tokens

    assert asyncio.run(work()) == pytest.approx(600, rel=0.15)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("s.toml", "[[shape]]\nname = 'a'\nmax_token = 3\n", "shape[0].max_token: Extra inputs"),
        ("s.yaml", "shape:\n- name: a\n  prompt_tokens: {kind: uniform, least: 9, most: 3}\n", "least is 9, above most"),
        ("s.yaml", "shape:\n- name: a\n  expect: jsn\n", 'shape[0].expect: "jsn" is no expectation'),
        ("s.toml", "shape = 3\n", "expected one list named shape"),
        ("s.toml", "[[shape]]\nname='a'\n[[shape]]\nname='a'\n", "names of their own"),
        ("s.yaml", "shape: [\n", "cannot be read"),
    ],
)
def test_a_wrong_file_of_shapes_is_named_with_its_key(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ShapeError, match=r"s\.(toml|yaml)|names of their own") as error:
        shapes.load(path)
    assert says in str(error.value)
    ran = opsctl("load", "run", "--shapes", path)
    assert ran.code == 2 and says in ran.err


def test_the_file_of_shapes_in_the_documentation_can_be_used(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/load.md").read_text()
    path = tmp_path / "shapes.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    chat, scan, agent = shapes.load(path)
    assert scan.expect == "json" and agent.tools and chat.body("m", random.Random(0))["messages"][0]["role"] == "system"


def test_a_sweep_writes_results_that_are_drawn_and_compared_on_the_same_host_and_day_only(
    server: StreamServer, tmp_path: Path, small: Path
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    for out in (before, after):
        ran = opsctl("load", "sweep", "--url", server.url, "--streams", "1,4", "--reps", "2", "--requests-per-stream", "1",
                     "--shapes", small, "--out", out, "--json")  # fmt: skip
        assert ran.code == 0, ran.err
    cells = ran.data["cells"]
    assert [c["level"] for c in cells] == ["1", "4"] and all(len(c["reps"]) == 2 for c in cells)
    drawn = opsctl("load", "plot", after, "--out", tmp_path / "plots", "--json").data["files"]
    svgs = [Path(file) for file in drawn if file.endswith(".svg")]
    assert {path.name for path in svgs} == {"after-throughput.svg", "after-first-token.svg", "after-inter-token.svg"}
    drawn_lines = [len(list(ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}polyline"))) for path in svgs]
    assert sorted(drawn_lines) == [1, 2, 3]  # throughput; p50 and p99; p50, p90 and p99
    compared = opsctl("load", "compare", before, after, "--json")
    assert compared.code == 0 and compared.data["forced"] == []
    throughput = next(r for r in compared.data["ratios"] if r["metric"] == "tokens_per_s" and r["level"] == "4")
    assert throughput["ratio"]["median"] == pytest.approx(throughput["second"]["median"] / throughput["first"]["median"])
    for key, value, why in (("begun_utc", "2026-01-02T00:00:00Z", "different days"), ("shapes_digest", "0", "different requests")):
        changed = tmp_path / "changed.json"
        changed.write_text(json.dumps({**json.loads(after.read_text()), key: value}))
        refused = opsctl("load", "compare", before, changed)
        assert refused.code == 2 and why in refused.err and "--force" in refused.err
        forced = opsctl("load", "compare", before, changed, "--force")
        assert forced.code == 0 and why in forced.out
    elsewhere = json.loads(after.read_text())
    elsewhere["host"]["name"] = "another"
    changed.write_text(json.dumps(elsewhere))
    assert "different hosts" in opsctl("load", "compare", before, changed).err


def test_two_servers_are_asked_the_same_things_in_turns_and_compared_pair_by_pair(small: Path) -> None:
    with streaming(token_s=0.002) as quick, streaming(token_s=0.03) as slow:
        ran = opsctl("load", "ab", "--url", quick.url, "--against", slow.url, "--streams", "2", "--reps", "2", "--requests-per-stream", "2",
                     "--shapes", small, "--json")  # fmt: skip
        asked = [[_known(body) for body in one.bodies] for one in (quick, slow)]
    assert ran.code == 0, ran.err
    assert sorted(asked[0]) == sorted(asked[1])
    ratio = next(r for r in ran.data["ratios"] if r["metric"] == "seconds.p50")["ratio"]
    assert ratio["count"] == 2 and ratio["median"] > 1.3
    lines = [line.split()[0] for line in ran.err.splitlines() if " tok/s" in line]
    assert lines == ["A", "B", "B", "A"]


def _known(body: dict[str, Any]) -> str:
    """A body without the words that only this run and side begin with."""
    said = body["messages"][-1]["content"].split()
    return json.dumps({**body, "messages": [*body["messages"][:-1], said[5:]]}, sort_keys=True)


def test_no_prompt_stands_in_the_prefix_cache_of_an_earlier_run_unless_it_is_asked_for(server: StreamServer, tmp_path: Path) -> None:
    def prompts(*more: str) -> set[str]:
        server.bodies.clear()
        out = tmp_path / "one.json"
        ran = opsctl("load", "run", "--url", server.url, "--streams", "1", "--reps", "1", "--requests", "2", "--out", out, *more)
        assert ran.code == 0, ran.err
        assert json.loads(out.read_text())["fresh"] is not bool(more)
        return {body["messages"][-1]["content"] for body in server.bodies if body["max_tokens"] > 1}

    first, second = prompts(), prompts()
    heads = [{" ".join(prompt.split()[:5]) for prompt in asked} for asked in (first, second)]
    assert all(len(head) == 1 for head in heads) and heads[0] != heads[1]
    assert {len(prompt.split()) for prompt in first} == {len(prompt.split()) for prompt in second}
    assert prompts("--cached") == prompts("--cached")


@pytest.mark.parametrize(("reps", "marked", "says"), [(2, False, "2 repetitions cannot tell"), (3, True, "chance alone marks 10.0%")])
def test_a_row_is_marked_only_where_there_are_repetitions_enough_to_tell(reps: int, marked: bool, says: str) -> None:
    spreads = [Spread.of([base + n for n in range(reps)]) for base in (10.0, 20.0)]
    one = table.Ratio("4", "tokens_per_s", *spreads, Spread.of([2.0]), table.apart(*spreads))
    assert one.apart is marked and says in table.of_ratios([one], "A", "B")


def test_two_configurations_of_one_address_are_started_in_turns_and_nothing_is_left(tmp_path: Path, small: Path) -> None:
    port = free_port()
    commands = [f"{sys.executable} {SERVER} {port} {token_s}" for token_s in (0.001, 0.03)]
    ran = opsctl("load", "ab", "--url", f"http://127.0.0.1:{port}", "--command", commands[0], "--against-command", commands[1],
                 "--streams", "1", "--reps", "1", "--requests-per-stream", "1", "--log", tmp_path / "log",
                 "--shapes", small, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert all(rep["errors"] == {} for one in ran.data["cells"] for rep in one["reps"])  # it was waited for while it loaded
    assert next(r for r in ran.data["ratios"] if r["metric"] == "seconds.p50")["ratio"]["median"] > 1.3
    assert opsctl("load", "run", "--url", f"http://127.0.0.1:{port}").code == 7


def test_a_command_that_does_not_serve_is_named_with_its_log(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ran = opsctl("load", "ab", "--url", url, "--command", "false", "--against-command", "false", "--log", tmp_path / "log")
    assert ran.code == 7 and "ended with 1" in ran.err and str(tmp_path / "log") in ran.err
    assert opsctl("load", "ab", "--url", url).code == 2
    assert opsctl("load", "sweep", "--url", url, "--streams", "0,4").code == 2


def test_a_run_in_which_nothing_was_answered_exits_9_and_says_what_came(server: StreamServer, tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[[shape]]\nname = "busy"\nextra = { trouble = "status:503" }\n')
    ran = opsctl("load", "run", "--url", server.url, "--shapes", file, "--requests", "5", "--reps", "1")
    assert ran.code == 9 and "5 http 503" in ran.out and "not one request" in ran.err


def test_results_that_have_nowhere_to_go_are_refused_before_the_run_and_shown_after_it(
    server: StreamServer, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_before = len(server.bodies)
    ran = opsctl("load", "run", "--url", server.url, "--shapes", small, "--out", tmp_path)
    assert ran.code == 2 and "Is a directory" in ran.err and len(server.bodies) == asked_before
    monkeypatch.setattr(results, "can_write", lambda path: None)
    ran = opsctl("load", "run", "--url", server.url, "--shapes", small, "--reps", "1", "--requests", "2", "--out", "/dev/full/x", "--json")
    assert ran.code == 1 and ran.errors[0]["code"] == "not written" and ran.data["cells"][0]["reps"][0]["ok"] == 2


def test_wilson_intervals_are_those_of_the_literature() -> None:
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson(100, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)
    assert wilson(3, 10) == pytest.approx((0.1078, 0.6032), abs=1e-4)
    with pytest.raises(ValueError, match="no count"):
        wilson(1, 0)


def test_percentiles_are_interpolated_and_a_spread_is_the_median_with_its_ends() -> None:
    assert [percentile([4, 1, 3, 2], share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 2.5, 3.7, 4])
    assert str(results.Spread.of([3, 1, 2])) == "2.00 [1.00..3.00]"


def test_a_drawing_of_one_level_and_of_zero_is_still_a_drawing() -> None:
    flat = plot.Curve("a", ((8.0, results.Spread(0, 0, 0, 1)),))
    assert "nan" not in plot.chart([flat], "t", "streams")
    assert table.ratios({}, {}, paired=True) == ()
