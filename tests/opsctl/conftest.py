from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import nodes
from tests.opsctl.site import Site


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nodes.SystemdNode]:
    """One booted node that the contracts of service managers share."""
    why = nodes.missing()
    if why:
        pytest.skip(why)
    booted = nodes.boot("opsctl-contract", tmp_path_factory.mktemp("nodes"))
    yield booted
    booted.stop()


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Deployments that run and answer; each is taken down with everything it started."""
    made: list[Site] = []

    def make(**options: Any) -> Site:
        site = Site(tmp_path / f"site{len(made)}", **options)
        made.append(site)
        site.start()
        return site

    yield make
    for site in made:
        site.close()
