"""A request of opsctl's has one deadline, whatever the server does meanwhile."""

from __future__ import annotations

import time

import httpx
import pytest

from opsctl import cut
from opsctl.rollout.probe import Api
from tests.drip import BEGINNINGS, dripping


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_server_that_drips_is_given_up_at_the_deadline(beginning: bytes) -> None:
    with dripping(beginning) as url:
        begun = time.monotonic()
        with cut.client(url, {}) as client, pytest.raises(httpx.ReadTimeout, match=r"not done in 0\.3 s"), cut.at_most(0.3) as limit:
            client.get("/health", timeout=60, extensions=limit.extensions)
        api = Api(url)
        try:
            for stream in (False, True):
                assert "not done in 0.3 s" in api.ask({"model": "m", "messages": [], "stream": stream}, 0.3).why
        finally:
            api.close()
        assert time.monotonic() - begun < 10
