"""Randomness without state: the noise of a token is a function of (seed, position, token) and of nothing else.

So a request draws the same tokens whatever shares its batch, with speculation or without, on a CPU or a GPU. Drawing
is by the Gumbel-max trick: the token with the largest ``logit + noise`` follows the softmax distribution. A small
difference in the logits (another batch shape rounds differently) then matters only where two tokens nearly tie; with
an inverse CDF it would shift every token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK64 = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _keys(seed: int, position: int) -> tuple[int, int]:
    key = _splitmix64(_splitmix64(seed & _MASK64) ^ position)
    return _signed32(key & 0xFFFFFFFF), _signed32(key >> 32)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (Wellons' lowbias32) on int32; its shifts are logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def gumbel(keys: Sequence[tuple[int, int]], tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, f32 [len(keys), T], for token ids int32 [T], or [len(keys), T] where rows differ.

    Args:
        keys: (seed, position) of each row.
    """
    made = torch.tensor([_keys(seed, position) for seed, position in keys], dtype=torch.int32, device=tokens.device)
    bits = _mix32(_mix32(tokens ^ made[:, :1]) ^ made[:, 1:])
    uniform = ((bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    # Exp(1) as -log(1 - u): near zero, where the winners are, u keeps its full precision. At u = 1 it would be infinite.
    exponential = torch.log1p(-uniform.clamp_(max=1 - 2.0**-24)).neg_()
    return exponential.log_().neg_()
