"""Is a difference in speed one? Recorded repetitions, and a real server that becomes slow."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from opsctl.rollout import throughput
from opsctl.rollout.checks import Outcome
from opsctl.rollout.throughput import Speed
from tests.opsctl.contract import contract


def speed(one: float, four: float, n: int = 8, noise: float = 0.03, **more: float) -> Speed:
    chance = random.Random(1)
    return Speed(tokens_per_s={key: [middle * (1 + noise * chance.uniform(-1, 1)) for _ in range(n)]
                               for key, middle in (("1", one), ("4", four))}, **more)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "outcome", "says"),
    [
        (speed(10, 30), speed(10, 30), Outcome.passed, "within"),
        (speed(10, 30), speed(20, 60), Outcome.passed, "within"),
        (speed(10, 30), speed(3, 9), Outcome.failed, "loses more than the 20 %"),
        (speed(10, 30), speed(10, 9), Outcome.failed, "loses more than the 20 %"),
        (speed(10, 30), speed(8, 24), Outcome.inconclusive, "both sides"),
        (speed(10, 30), speed(3, 9, n=3), Outcome.inconclusive, "5 are needed"),
        (speed(10, 30, noise=0.9), speed(3, 9, noise=0.9), Outcome.inconclusive, "scatter"),
        (speed(10, 30, foreign=0.5), speed(3, 9), Outcome.inconclusive, "for others"),
        (None, speed(10, 30), Outcome.inconclusive, "not measured before"),
    ],
)
def test_a_loss_must_be_sure_on_a_quiet_steady_machine(before: Speed | None, after: Speed, outcome: Outcome, says: str) -> None:
    found = throughput.compare(before, after, 20)
    assert found.outcome is outcome and says in found.evidence, found


def test_a_server_that_has_become_slow_is_measured_as_slow(tmp_path: Path) -> None:
    def measured(*args: str) -> Speed:
        with contract(tmp_path, *args) as api:
            counters = ("lastbatch:generation_tokens_total",)
            return throughput.measure(lambda request: api.ask(request, 5.0), lambda: "n", counter=lambda: api.generated_tokens(counters),
                                      load=lambda: {"here": 1.0})  # fmt: skip

    before, after = measured("--slow-s", "0.04"), measured("--slow-s", "0.25")
    assert (before.foreign, after.foreign) == (0.0, 0.0)  # every token was for this
    found = throughput.compare(before, after, 50)
    assert all(found.data[f"loss_pct_{n}"][1] > 50 for n in (1, 4)) and "load here 1.0 before" in found.evidence, found
    # On a machine that is busy with other tests the repetitions may scatter, and then that is what must be said.
    assert found.outcome is Outcome.failed or "scatter" in found.evidence, found


def test_the_interval_holds_the_median() -> None:
    low, found, high = throughput.loss([10, 11, 12, 10, 11], [5, 6, 5, 6, 5])
    assert low <= found <= high and 0.4 < found < 0.6
