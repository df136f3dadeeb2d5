"""Rotary position embedding: frequencies of each kind of scaling, and the table of cosines and sines."""

from __future__ import annotations

import math

import torch

from engine.model.hf_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """f32 [head_dim / 2] angles per position, and the factor on cosine and sine (1 for all kinds but yarn)."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def rope_table(rope: Rope, head_dim: int, context: int) -> torch.Tensor:
    """f32 [context, head_dim]: the cosines of the head_dim/2 angles at each position, then their sines."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): dimensions that turn often are kept, those that turn seldom are interpolated."""

    def dimension(turns: float) -> float:
        return (head_dim * math.log(rope.original_context / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    interpolated = ramp.clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)


def _yarn_attention_factor(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
