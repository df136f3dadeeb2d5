"""How the layers of a decoder run: the protocol, and the implementation in torch (the reference, and CUDA's).

``native_ops.py`` holds the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.exec.batch import ForwardBatch
from engine.exec.kv import KVPool
from engine.model.attention import AttentionPlan, attend
from engine.model.hf_config import ModelConfig
from engine.model.layers import add_norm, rms_norm, rotate, silu_mul
from engine.model.loader import LayerWeights, Weights
from engine.model.rope import rope_table
from engine.model.shard import Shard
from engine.parallel.group import Group


class Ops(Protocol):
    def run_layers(self, hidden: torch.Tensor, batch: ForwardBatch, kv: KVPool, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        """Run all layers. ``hidden`` [T, hidden] is updated in place to the residual before the last ``delta``,
        which is returned, summed over the ranks."""
        ...

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> f32 [R, vocab_rows], this rank's part of the vocabulary."""
        ...

    def paths(self) -> dict[str, str]:
        """Which implementations run, by concern."""
        ...


class TorchOps:
    """Plain torch, one operation after the other."""

    def __init__(self, config: ModelConfig, shard: Shard, weights: Weights, group: Group) -> None:
        self._config = config
        self._shard = shard
        self._weights = weights
        self._group = group
        self._eps = config.rms_eps
        self._windows = frozenset(config.windows)
        self._scale = 1 / math.sqrt(config.head_dim)
        self._table = rope_table(config.rope, config.head_dim, config.context).to(weights.embed.device)

    def run_layers(self, hidden: torch.Tensor, batch: ForwardBatch, kv: KVPool, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        plan = AttentionPlan(batch, self._windows)
        table = self._table[batch.positions]
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            if on_layer is not None:
                on_layer(index)
            attended = self._attention(index, layer, add_norm(hidden, delta, layer.input_norm, self._eps), batch, plan, table, kv)
            delta = F.linear(attended, layer.o, layer.o_bias)
            self._group.all_reduce(delta)
            normed = add_norm(hidden, delta, layer.post_norm, self._eps)
            delta = F.linear(silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
            self._group.all_reduce(delta)
        assert delta is not None, "a model has one layer or more"
        return delta

    def _attention(self, index: int, layer: LayerWeights, normed: torch.Tensor, batch: ForwardBatch, plan: AttentionPlan,
                   table: torch.Tensor, kv: KVPool) -> torch.Tensor:  # fmt: skip
        size, heads, kv_heads = self._config.head_dim, len(self._shard.heads), len(self._shard.kv_heads)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, size)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, self._eps), rms_norm(k, layer.k_norm, self._eps)
        kv.keys[index].index_copy_(0, batch.slots, rotate(k, table))
        kv.values[index].index_copy_(0, batch.slots, v)
        return attend(rotate(q, table), kv.keys[index], kv.values[index], plan, self._config.windows[index], self._scale).flatten(1)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return add_norm(residual, delta, weight, self._eps)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        return F.linear(normed, self._weights.head).float()

    def paths(self) -> dict[str, str]:
        return {"linear": "torch", "attention": "torch scaled_dot_product_attention", "layers": "torch"}
