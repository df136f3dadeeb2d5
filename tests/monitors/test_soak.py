"""A small share of ``make soak-monitor``: some simulated hours of each dialect, and each wedge."""

from __future__ import annotations

import pytest

from tests.slow.soak_monitor import DIALECTS, healthy, wedges


@pytest.mark.parametrize("dialect", DIALECTS)
def test_healthy_hours_page_nobody_though_they_have_silences(dialect: str) -> None:
    found = healthy(dialect, 20.0, seed=7)
    assert found.pages == []
    assert found.looks > 10_000 and found.hours >= 20
    assert max(found.silences.values()) > (5 if dialect == "lastbatch" else 60), "hours without a silence prove nothing"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_wedge_is_declared_and_paged(dialect: str) -> None:
    found = wedges(dialect, 27, seed=7)
    assert [one for one in found if one.paged_s is None] == []
    assert [one for one in found if one.declared_s is None or one.declared_s > one.bound_s] == []
