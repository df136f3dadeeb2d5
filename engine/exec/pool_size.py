"""How many pages a rank's KV pool has. Pure: what the machine has is an argument."""

from __future__ import annotations

from engine.config import CPU_POOL_TOKENS, CacheSettings, ConfigError

_LEAST_PAGES = 2


def pool_pages(cache: CacheSettings, *, useful_tokens: int, page_bytes: int, left_bytes: int | None, machine_bytes: int | None) -> int:
    """Pages of one rank's pool.

    Args:
        useful_tokens: what all running requests together can hold at most; a larger pool would serve only the prefix cache.
        page_bytes: of one page on this rank, see ``KVPool.bytes_per_page``.
        left_bytes: what ``--mem-fraction-static`` leaves to this rank's pool; None: it says nothing here, as on a CPU by default.
        machine_bytes: this rank's part of all the memory there is; None: not known, the device itself refuses too much.

    Raises:
        ConfigError: the pool that the flags ask for is larger than the machine's memory.
    """
    if cache.max_total_tokens:
        pages = max(_LEAST_PAGES, cache.max_total_tokens // cache.page_size)
    else:
        most = CPU_POOL_TOKENS // cache.page_size if left_bytes is None else left_bytes // page_bytes
        pages = max(_LEAST_PAGES, min(most, useful_tokens // cache.page_size))
    if machine_bytes is not None and pages * page_bytes > machine_bytes:
        tokens, size = pages * cache.page_size, pages * page_bytes
        raise ConfigError(f"--max-total-tokens: {tokens} tokens of KV take {size / 1e9:.1f} GB on each rank, and "
                          f"the machine has {machine_bytes / 1e9:.1f} GB for it; give fewer")  # fmt: skip
    return pages
