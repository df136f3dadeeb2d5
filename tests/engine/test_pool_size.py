"""How large the KV pool is, and that it takes no memory before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import CPU_POOL_TOKENS, CacheSettings, ConfigError
from engine.exec.kv import KVPool
from engine.exec.pool_size import pool_pages

SMALL = 23040 * 16  # bytes of a page of 16 tokens of SmolLM2-135M in bfloat16
GB = 10**9


def tokens(
    cache: CacheSettings, *, useful: int = 262_144, page_bytes: int = SMALL, left: int | None = None, machine: int | None = 64 * GB
) -> int:
    return 16 * pool_pages(cache, useful_tokens=useful, page_bytes=page_bytes, left_bytes=left, machine_bytes=machine)


def test_on_a_cpu_it_is_the_same_on_every_machine_that_can_hold_it() -> None:
    assert {tokens(CacheSettings(), machine=machine) for machine in (GB, 8 * GB, 512 * GB)} == {CPU_POOL_TOKENS}
    assert CPU_POOL_TOKENS * SMALL // 16 < GB


def test_no_more_than_all_running_requests_can_fill() -> None:
    assert tokens(CacheSettings(), useful=4096) == 4096


def test_a_flag_is_taken_by_its_word_and_a_share_by_its_bytes() -> None:
    assert tokens(CacheSettings(max_total_tokens=100_000)) == 100_000
    assert tokens(CacheSettings(mem_fraction=0.5), left=SMALL * 10) == 160
    assert tokens(CacheSettings(mem_fraction=0.5), left=0) == 32, "two pages are the least that works"


def test_more_than_the_machine_has_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens: 800000 tokens .* 18\.4 GB on each rank, .* 8\.0 GB"):
        tokens(CacheSettings(max_total_tokens=800_000), machine=8 * GB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pool_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    before = resident_bytes()
    pool = KVPool(8, 16_384, 16, 4, 64, dtype)
    size = 2 * pool.layer_bytes * pool.layers
    assert resident_bytes() - before < size // 20
    assert not pool.keys[7][-1].any() and pool.keys[0].data_ptr() % 64 == 0
    pool.values[3][5] = 1
    assert pool.values[3][5].sum() == 4 * 64 and not pool.values[3][4].any() and not pool.keys[3][5].any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
