"""A guarded change of the real engine: two ranks on two embedded services, with a small random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rollout_group import Group


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"))
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_what_the_model_cannot_do_is_refused_before_anything_is_stopped(group: Group) -> None:
    code, answer, err = group.rollout("apply", "--yes", "--set", "tp=3")
    assert code == 2, err
    assert "--tp: 3 does not divide" in answer["errors"][0]["message"]


@pytest.mark.slow  # `make demo` and two systemd nodes (test_engine_on_nodes.py) show the same
def test_the_fix_that_crashes_is_reverted_and_the_one_that_works_is_committed(group: Group) -> None:
    code, answer, err = group.rollout("apply", "--yes", "--set", "disable-overlap-schedule")
    assert code == 3, err
    failed = next(check for check in answer["data"]["checks"] if check["outcome"] == "failed")
    assert any("TypeError" in trace for trace in failed["data"]["tracebacks"]), failed
    assert [check["outcome"] for check in answer["data"]["revert_checks"]] == ["passed"] * 5, err
    assert answer["data"]["page_sent"] is True
    assert group.ask_json() == 200
    code, answer, err = group.rollout("apply", "--yes", "--set", "grammar-backend=none")
    assert code == 0, err
    assert {check["name"]: check["outcome"] for check in answer["data"]["checks"]}["ranks"] == "passed"
    assert group.ask_json() == 400
