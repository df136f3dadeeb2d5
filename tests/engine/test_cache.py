"""The page pool and the prefix cache: every page in one hand, freed by epoch, found again by its tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.memory import Holding, KVMemory
from engine.cache.pages import PagePool, PoolError
from engine.cache.prefix import PrefixCache


def memory(pages: int = 16, page_size: int = 4, *, reuse: bool = True) -> KVMemory:
    return KVMemory(PagePool(pages, page_size), PrefixCache(page_size, enabled=reuse))


def test_a_page_is_free_only_after_the_forward_pass_that_may_touch_it() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(4)
    assert pages is not None
    pool.release(pages, epoch=7)
    assert (pool.free, pool.pending) == (0, 4)
    pool.complete(6)
    assert pool.allocate(1) is None
    pool.complete(7)
    assert (pool.free, pool.pending) == (4, 0)


def test_a_page_given_back_twice_is_found() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    assert pages is not None
    pool.release(pages, 0)
    pool.release(pages, 0)
    with pytest.raises(PoolError, match="both free and free"):
        pool.check(cached=[], held=[])


def test_a_lost_page_is_found() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    assert pages is not None
    pool.release(pages[:1], 0)
    with pytest.raises(PoolError, match=r"2 of 4 pages are in nobody's hand"):
        pool.check(cached=[], held=[])


def test_the_longest_common_prefix_is_found_in_whole_pages() -> None:
    cache = PrefixCache(4)
    cache.insert(range(12), [5, 6, 7])
    assert cache.match(range(11)).pages == (5, 6)
    assert cache.match([0, 1, 2, 3, 99, 98, 97, 96]).pages == (5,)
    assert cache.match([9, 9, 9, 9]).pages == ()


def test_a_text_that_parts_in_mid_run_splits_the_run() -> None:
    cache = PrefixCache(2)
    cache.insert([1, 1, 2, 2, 3, 3], [10, 11, 12])
    found, spare = cache.insert([1, 1, 2, 2, 4, 4], [20, 21, 22])
    assert found.pages == (10, 11, 22)
    assert spare == [20, 21]
    assert cache.match([1, 1, 2, 2, 3, 3]).pages == (10, 11, 12)
    assert cache.size == 4


def test_eviction_takes_the_least_recently_used_leaf_and_no_locked_one() -> None:
    cache = PrefixCache(1)
    cache.insert([1, 2], [0, 1])
    cache.insert([1, 3], [9, 2])
    cache.match([1, 2])
    assert cache.evict(1) == [2]
    found = cache.match([1, 2])
    cache.lock(found.node)
    assert cache.evict(5) == []
    cache.unlock(found.node)
    assert sorted(cache.evict(5)) == [0, 1]
    assert (cache.size, cache.evictable) == (0, 0)


def test_publishing_what_another_has_published_goes_over_to_its_pages() -> None:
    kv = memory()
    tokens = list(range(8))
    first, second = kv.attach(tokens), kv.attach(tokens)
    for holding in (first, second):
        assert kv.grow(holding, 8)
        holding.kv_len = 8
    own = list(second.pages)
    kv.publish(first, tokens, epoch=3)
    kv.publish(second, tokens, epoch=3)
    assert second.pages == first.pages
    assert kv.pool.pending == len(own)
    kv.complete(3)
    kv.release(first, tokens, 3, keep=True)
    kv.release(second, tokens, 3, keep=True)
    kv.check([])


def test_a_released_prefix_cannot_be_evicted_while_a_launched_step_may_read_it() -> None:
    kv = memory(pages=4)
    tokens = list(range(16))
    holding = kv.attach(tokens)
    assert kv.grow(holding, 16)
    holding.kv_len = 16
    kv.publish(holding, tokens, epoch=1)
    kv.complete(1)
    kv.release(holding, tokens, 2, keep=False)
    assert not kv.grow(kv.attach([99] * 4), 4)
    kv.complete(2)
    assert kv.grow(kv.attach([99] * 4), 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_any_order_of_use_keeps_the_books(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    kv = memory(pages=24, page_size=page_size)
    held: list[tuple[Holding, list[int]]] = []
    epoch = 0
    for _ in range(60):
        action = rng.random()
        if action < 0.45:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 20))]
            holding = kv.attach(tokens, reuse=rng.random() < 0.8)
            if kv.grow(holding, len(tokens)):
                holding.kv_len = len(tokens)
                held.append((holding, tokens))
            else:
                kv.release(holding, tokens, 0, keep=False)
        elif action < 0.6 and held:
            holding, tokens = rng.choice(held)
            kv.publish(holding, tokens, epoch + 1)
        elif held:
            holding, tokens = held.pop(rng.randrange(len(held)))
            kv.release(holding, tokens, epoch + 1, keep=rng.random() < 0.7)
        if rng.random() < 0.5:
            epoch += 1
            kv.complete(epoch)
        kv.check(holding for holding, _ in held)
    for holding, tokens in held:
        kv.release(holding, tokens, epoch, keep=True)
    kv.complete(epoch + 1)
    kv.forget_prefixes()
    assert kv.pool.free == kv.pool.total
