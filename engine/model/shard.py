"""Which part of a model a tensor-parallel rank holds.

::

    q/k/v rows and o columns    by head: rank r of n has query heads r*H/n .. (r+1)*H/n. Key/value heads are split in
                                the same way; with more ranks than key/value heads each head is held by n/KV ranks
    gate/up rows, down columns  by intermediate size
    embedding and head rows     by vocabulary, ceil(V/n) each; the last ranks' missing rows are zero
    norms                       whole on every rank
    o and down biases           on rank 0 only: they are added before the sum over ranks
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.hf_config import ModelConfig, ModelConfigError


@dataclass(frozen=True)
class Shard:
    """Half-open ranges of the whole model's rows that a rank holds."""

    rank: int
    world: int
    heads: range
    kv_heads: range
    inner: range
    vocab: range  # within 0..config.vocab; may be shorter than vocab_rows, or empty
    vocab_rows: int  # rows that each rank holds, padding included

    @staticmethod
    def of(config: ModelConfig, rank: int, world: int) -> Shard:
        """Raises ModelConfigError when the model does not divide by ``world``."""
        fits = config.heads % world == 0 and config.intermediate % world == 0
        if not fits or (config.kv_heads % world and world % config.kv_heads):
            raise ModelConfigError(
                f"--tp: {world} does not divide {config.heads} query heads, {config.kv_heads} key/value heads and "
                f"an intermediate size of {config.intermediate}"
            )
        vocab_rows = -(-config.vocab // world)
        kv_count = max(1, config.kv_heads // world)
        kv_first = rank * config.kv_heads // world
        return Shard(
            rank=rank,
            world=world,
            heads=_part(config.heads // world, rank),
            kv_heads=range(kv_first, kv_first + kv_count),
            inner=_part(config.intermediate // world, rank),
            vocab=range(min(rank * vocab_rows, config.vocab), min((rank + 1) * vocab_rows, config.vocab)),
            vocab_rows=vocab_rows,
        )


def _part(size: int, rank: int) -> range:
    return range(rank * size, (rank + 1) * size)
