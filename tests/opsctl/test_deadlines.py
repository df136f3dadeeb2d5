from __future__ import annotations

import math

import pytest

from monitors import fleet
from opsctl.rollout import deadlines
from opsctl.rollout.boots import Boot, slowest
from opsctl.rollout.deadlines import Asked, Times

ONE = fleet.parse(
    "[deployment.d]\nengine = 'lastbatch'\napi = 'http://h:1'\nboot_deadline_s = 600\nstable_s = 9\n"
    "[[deployment.d.node]]\nname = 'a'\n[[deployment.d.node.service]]\nunit = 'x.service'\n",
    "f",
).one()  # fmt: skip


def boots(*seconds: float) -> list[Boot]:
    return [Boot(at_utc="t", seconds=one) for one in seconds]


@pytest.mark.parametrize(
    ("asked", "recorded", "boot_s", "why"),
    [
        (Asked(), [], 600, "no boot of this deployment is recorded"),
        (Asked(), boots(2, 5, 3), 60, "3 x 5.0 s, the slowest of the last 3 recorded boots"),
        (Asked(), boots(100), 300, "3 x 100.0 s"),
        (Asked(), boots(500), 600, "at most boot_deadline_s 600 s"),
        (Asked(), boots(500, *[90] * 10), 270, "3 x 90.0 s"),
        (Asked(boot_s=7), boots(100), 7, "--boot-deadline-s"),
    ],
)
def test_the_boot_deadline_comes_from_recorded_boots_and_says_so(asked: Asked, recorded: list[Boot], boot_s: float, why: str) -> None:
    times, sources = deadlines.derive(asked, ONE, recorded, 45.0)
    assert times.boot_s == boot_s and why in sources["boot_s"]
    assert times.revert_boot_s >= times.boot_s >= times.answer_s
    assert times.stable_s == 9 and times.stop_s == 60
    assert times.problems() == ()


def test_times_that_cannot_work_together_are_named() -> None:
    assert Times().problems() == ()
    assert "--boot-deadline-s 10" in Times(boot_s=10).problems()[0]
    assert "the revert would get 5 s" in Times(revert_boot_s=5).problems()[0]
    assert "hold_s 1 is below the lease" in Times(hold_s=1).problems()[0]
    assert "lease_s: 0 is no time" in Times(lease_s=0).problems()[0]


@pytest.mark.parametrize("name", ["boot_s", "stable_s", "lease_s", "hold_s", "revert_boot_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_time_that_never_comes_is_refused(name: str, value: float) -> None:
    assert any(name in one for one in Times(**{name: value}).problems())


def test_of_no_boots_none_is_the_slowest() -> None:
    assert slowest([]) is None
