"""Each rung of the smoke ladder, and the drift of greedy answers, failed by a real server that is broken there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.opsctl.site import Site

MakeSite = Callable[..., Site]


@pytest.mark.parametrize(
    ("trouble", "check", "says"),
    [
        ("no-stream", "streaming", "without [DONE]"),
        ("most-prompt=400", "long context", "http 500"),
        ("no-tools", "tool call", "text where tool_call is due"),
        ("text-for=colour", "json", "text where json is due"),
        ("scrambled", "drift", "greedy answers are not those of before"),
    ],
)
def test_a_rung_that_is_lost_is_reverted(make_site: MakeSite, trouble: str, check: str, says: str) -> None:
    site = make_site()
    ran = site.apply("--set", trouble)
    assert ran.code == 3, ran.err
    failed: dict[str, Any] = ran.data["checks"][-1]
    assert (failed["name"], failed["outcome"]) == (check, "failed")
    assert says in failed["evidence"]


def test_a_rung_that_was_never_climbed_need_not_be_and_one_that_the_plan_refuses_is_no_loss(make_site: MakeSite) -> None:
    site = make_site(args=["--no-tools"])
    ran = site.apply("--set", "grammar-backend=none")
    assert ran.code == 0, ran.err
    evidence = {one["name"]: one["evidence"] for one in ran.data["checks"]}
    assert "http 400, as planned" in evidence["json"]
    again = site.apply("--set", "page-size=32")
    assert again.code == 0, again.err
    back = site.apply("--unset", "grammar-backend")
    assert back.code == 3, back.err  # a tool call is due again, and was not given before either
