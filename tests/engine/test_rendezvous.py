"""Ranks that come to a store which is not theirs."""

from __future__ import annotations

import time

import pytest

from engine.parallel import rendezvous
from engine.parallel.rendezvous import Address, RendezvousError


def test_a_rank_that_comes_a_second_time_is_refused_instead_of_joining_a_group_that_lost_it() -> None:
    store = rendezvous.serve_store(Address("127.0.0.1", 0), 2, time.monotonic() + 10)
    late = rendezvous.join_store(Address("127.0.0.1", store.port), 2, time.monotonic() + 10)
    late.set("come/1", "1")
    with pytest.raises(RendezvousError, match="rank 1 has come to this group before"):
        rendezvous.join_group(late, "gloo", 1, 2, time.monotonic() + 10, "127.0.0.1")
