from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.opsctl.site import Site


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
