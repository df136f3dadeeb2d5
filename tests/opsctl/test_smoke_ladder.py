"""Each rung of the smoke ladder, and the drift of greedy answers, failed by a real server that is broken there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opsctl.rollout.checks import Outcome
from opsctl.rollout.probe import Api
from opsctl.rollout.smoke import drift, ladder
from tests.opsctl.contract import contract
from tests.opsctl.site import Site

MakeSite = Callable[..., Site]
NUMBER = itertools.count()


def climbed(api: Api, name: str) -> ladder.Climbed:
    found = ladder.rungs(lambda request: api.ask(request, 10.0), lambda: f"n{next(NUMBER)}", context=512, faulty=lambda reply: "")
    rung = next(rung for rung in found if rung.name == name)
    return ladder.climb(rung, lambda kind: kind == rung.want)


@pytest.mark.parametrize(
    ("trouble", "rung", "kind", "says"),
    [
        ("--no-stream", "streaming", "none", "without [DONE]"),
        ("--most-prompt=400", "long context", "http 500", "does not fit"),
        ("--no-tools", "tool call", "text", ""),
        ("--text-for=colour", "json", "text", "asked for JSON"),
        ("--grammar-backend=none", "json", "http 400", "Grammar-based"),
        ("--garbage", "concurrent", "degenerate", "one of 4 at once"),
    ],
)
def test_a_rung_says_what_came_instead(tmp_path: Path, trouble: str, rung: str, kind: str, says: str) -> None:
    with contract(tmp_path, trouble) as api:
        found = climbed(api, rung)
    assert found.kind == kind and says in found.detail, found


def test_a_sound_server_climbs_every_rung_and_gives_the_same_greedy_answers_twice(tmp_path: Path) -> None:
    with contract(tmp_path) as api:
        kinds = [climbed(api, name).kind for name in ("streaming", "long context", "concurrent", "tool call", "json")]
        first, again = (drift.answers(lambda request: api.ask(request, 10.0)) for _ in range(2))
    assert kinds == ["text", "text", "text", "tool_call", "json"]
    assert drift.compare(first, again, 1.0).outcome is Outcome.passed


@pytest.mark.parametrize(
    ("after", "share", "outcome"),
    [("abcdefgh", 1.0, Outcome.passed), ("abcdefgX", 1.0, Outcome.failed), ("abcdefgX", 0.5, Outcome.passed),
     ("Xbcdefgh", 0.5, Outcome.failed), ("abcdefgh and more", 1.0, Outcome.failed), ("", 0.5, Outcome.failed)],
)  # fmt: skip
def test_greedy_answers_must_keep_the_share_that_is_declared(after: str, share: float, outcome: Outcome) -> None:
    assert drift.compare({"a": "abcdefgh"}, {"a": after}, share).outcome is outcome


def test_nothing_to_compare_with_is_no_pass() -> None:
    assert drift.compare({}, {"a": "x"}, 0.5).outcome is Outcome.inconclusive


def test_a_rung_of_a_dangerous_shape_is_left_out_with_its_whole_machinery() -> None:
    found = ladder.rungs(lambda request: None, lambda: "n", context=0, faulty=lambda reply: "")  # type: ignore[arg-type, return-value]
    never: list[dict[str, Any]] = [{"messages": [], "response_format": {"type": "json_object"}}]
    assert [rung.name for rung in found if ladder.left_out(rung, never)] == ["tool call", "json"]


def test_fluent_nonsense_is_reverted_and_a_rung_that_was_never_climbed_need_not_be(make_site: MakeSite) -> None:
    site = make_site(args=["--no-tools"])
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 0, ran.err
    assert next(one["evidence"] for one in ran.data["checks"] if one["name"] == "tool call").startswith("text, as before the change")
    ran = site.apply("--set", "scrambled")
    assert ran.code == 3, ran.err
    failed = ran.data["checks"][-1]
    assert (failed["name"], failed["outcome"]) == ("drift", "failed")
    assert "greedy answers are not those of before" in failed["evidence"]


def test_a_server_that_breaks_off_its_streams_already_is_no_baseline(make_site: MakeSite) -> None:
    ran = make_site(args=["--no-stream"]).apply("--set", "page-size=32")
    assert ran.code == 9, ran.err
    assert "streaming: none before anything was changed" in ran.errors[0]["message"]
