"""The stability window with the hang monitor armed, beside real ranks; canaries that answer well whatever the ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monitors.judge.progress import Limits
from opsctl.callers.traffic import Rates
from opsctl.rollout import checks, soak
from opsctl.rollout.before import Before
from opsctl.rollout.checks import Check, Outcome
from opsctl.rollout.scope import Scope
from opsctl.rollout.sentry import Sentry
from opsctl.rollout.watch import Watch
from opsctl.service.wait import Waiter
from tests.monitors.cluster import HEALTHY, Cluster, small_fleet, until, web


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


def window(seconds: float, sentry: Sentry | None = None, scope: Scope | None = None) -> Check:
    waiter = Waiter(poll_s=0.02)
    return soak.steady(seconds, Watch((), {}, waiter), waiter, answer=lambda: None, log=lambda: checks.passed("log", "clean"),
                       texts=list, sentry=sentry, scope=scope)  # fmt: skip


def test_ranks_that_stand_still_behind_good_answers_fail_the_window_with_the_monitors_verdict_and_its_evidence(
    tmp_path: Path, cluster: Cluster
) -> None:
    with web(HEALTHY) as server:
        deployment = small_fleet(cluster, server.url).one()
        cluster.work()
        sentry = Sentry(deployment, {"small-a": ""}, tmp_path / "bundles", limits=Limits(stall_s=1.0))
        try:
            assert window(0.3, sentry).outcome is Outcome.passed
            cluster.wedge("grammar")
            until(sentry.deciding, "the stall is declared")
            found = window(0.1, sentry)
        finally:
            sentry.close()
    assert found.outcome is Outcome.failed, found
    assert "hang_grammar_barrier" in found.evidence
    assert (Path(found.evidence.rpartition("evidence: ")[2]) / "manifest.json").is_file()


def test_a_monitor_that_sees_nothing_has_not_seen_that_all_is_well(tmp_path: Path) -> None:
    class Nothing:
        run_dir, log = tmp_path / "none", tmp_path / "none.log"

    with web({}) as server:
        sentry = Sentry(small_fleet(Nothing(), server.url).one(), {"small-a": ""}, tmp_path, sight_s=1.0)  # type: ignore[arg-type]
        try:
            found = window(0.1, sentry)
        finally:
            sentry.close()
    assert found.outcome is Outcome.inconclusive and "could see nothing" in found.evidence


def test_a_client_that_asks_no_more_is_flagged_in_the_window(tmp_path: Path, cluster: Cluster) -> None:
    deployment = small_fleet(cluster, "http://127.0.0.1:9").one()
    found = window(0.3, scope=Scope(deployment, before=Before(at_utc="", rates=Rates(600, {"abcd": 100.0}))))
    assert found.outcome is Outcome.inconclusive and "caller abcd: 0 requests" in found.evidence
