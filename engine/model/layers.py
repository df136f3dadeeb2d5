"""The small operations of a layer in torch, with the roundings of transformers: the reference, and the CUDA path."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension: in f32, rounded, then scaled."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``residual += delta`` in place, and the norm of the sum. Both [T, hidden]."""
    if delta is not None:
        residual.add_(delta)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * inner] -> [T, inner]: silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn [T, heads, head_dim] by ``table`` [T, head_dim] (cosines, then sines, of head_dim/2 angles)."""
    half = x.shape[-1] // 2
    cosine, sine = table[:, None, :half].to(x.dtype), table[:, None, half:].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
