"""Several replicas of one deployment: one at a time, the canary first, all of them or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from opsctl.service.embedded import EmbeddedService
from tests.opsctl.site import Site, wait_until
from tests.ports import free_port


class Replicas(Site):
    """Two replicas of one rank each, on two ports."""

    def __init__(self, folder: Path, *, args: tuple[str, ...] = ()) -> None:
        super().__init__(folder, args=args)
        self.other_port = free_port()
        text = (folder / "services" / "node0.toml").read_text()
        (folder / "services" / "node1.toml").write_text(text.replace(f'"{self.port}"', f'"{self.other_port}"').replace("node0", "node1"))
        self.names = ["node0", "node1"]
        nodes = "".join(
            f"[[deployment.d.node]]\nname = 'n{at}'\nreplica = '{at}'\napi = 'http://127.0.0.1:{port}'\n"
            f"[[deployment.d.node.service]]\nunit = 'node{at}'\nranks = [0]\nlog = 'log/node{at}.log'\n"
            for at, port in enumerate((self.port, self.other_port))
        )
        (folder / "fleet.toml").write_text(
            f"[deployment.d]\nengine = 'lastbatch'\napi = 'http://127.0.0.1:{self.port}'\nservice = 'embedded'\nstable_s = 0.2\n{nodes}"
            f"[page]\nurls = ['{self.pages.url}']\n"
        )

    def answers(self) -> bool:
        try:
            return all(httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200 for port in (self.port, self.other_port))
        except httpx.HTTPError:
            return False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path / "r")
    made.start()
    yield made
    made.close()


def ids(services: list[EmbeddedService]) -> list[str]:
    return [service.snapshot().invocation_id for service in services]


def test_a_good_change_goes_over_the_replicas_one_after_the_other_and_is_committed_as_a_whole(site: Replicas) -> None:
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 0, ran.err
    order = [entry["data"]["group"] for entry in site.rollout("show").data["entries"] if entry["state"] == "restarted"]
    assert order == ["node0", "node1"]
    assert ran.data["moments"]["first good answer"] < ran.data["moments"]["node1: group stopping"]
    assert all(args[-2:] == ["--page-size", "32"] for args in site.running)
    assert all(service.read_change().committed for service in site.services)


def test_a_canary_that_fails_leaves_the_other_replica_alone(site: Replicas) -> None:
    before = ids(site.services)
    ran = site.apply("--set", "fail-at-boot")
    assert ran.code == 3, ran.err
    now = ids(site.services)
    assert now[0] != before[0] and now[1] == before[1]
    assert all("--fail-at-boot" not in args for args in site.running)
    assert site.services[1].read_change().trial is None and site.services[1].lease_token() == ""


def test_a_failure_of_the_second_replica_reverts_the_canary_too(site: Replicas) -> None:
    """The second replica cannot be stopped and started by then: its program has gone."""
    ran_before = site.apply("--set", "page-size=16")
    assert ran_before.code == 0, ran_before.err
    file = site.folder / "services" / "node1.toml"
    file.write_text(file.read_text() + "start_s = 0.05\n")  # from its next start on it is killed before it is ready
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 4, ran.err  # nor can the revert bring it back: that is stuck, and paged
    assert ran.data["page_sent"] is True
    assert "16" in site.running[0]
    assert [service.read_change().trial for service in site.services] == [None, None]


def test_a_canary_that_dies_while_the_next_replica_is_changed_reverts_both(site: Replicas) -> None:
    ran = site.apply("--set", "crash-after=14", "--stable-s", "3")
    assert ran.code == 3, ran.err
    assert all("--crash-after" not in args for args in site.running)
    wait_until(site.answers)


def test_a_replica_after_the_canary_may_fail_as_often_as_the_budget_says(site: Replicas) -> None:
    """The canary may never."""
    (site.folder / "boxes" / "node0" / "trip").touch()
    ran = site.apply("--set", "fails-once=trip", "--failure-budget", "5")
    assert ran.code == 3 and "not this time" in ran.data["why"], ran.err
    (site.folder / "boxes" / "node1" / "trip").touch()
    ran = site.apply("--set", "fails-once=trip", "--failure-budget", "1")
    assert ran.code == 0, ran.err
    assert all(args[-2:] == ["--fails-once", "trip"] for args in site.running)
    failed = [entry["data"] for entry in site.rollout("show").data["entries"] if entry["event"] == "failed"]
    assert [one["group"] for one in failed] == ["node1"] and "not this time" in failed[0]["why"]
    assert site.rollout("plan", "--set", "page-size=32", "--failure-budget", "-1").code == 2
