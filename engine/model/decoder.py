"""The decoder that the Llama family, Mistral, Qwen2 and Qwen3 share; what differs is in ModelConfig.

The residual stream is kept as a running sum: each half layer hands its output on as ``delta``, and the next norm adds
it. With several ranks ``delta`` is a part, summed over the ranks right after its matrix product. A step enters, in
this order and on every rank: all_reduce of the embedding, then two for each layer, then all_gather of the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.exec.batch import ForwardBatch
from engine.exec.kv import KVPool
from engine.model.hf_config import ModelConfig
from engine.model.loader import Weights
from engine.model.ops import Ops
from engine.model.shard import Shard
from engine.parallel.group import Group


class Decoder:
    """A loaded model on one rank. ``config`` describes the whole model."""

    def __init__(self, config: ModelConfig, shard: Shard, weights: Weights, group: Group, ops: Ops) -> None:
        self.config = config
        self.shard = shard
        self._weights = weights
        self._group = group
        self._ops = ops

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Run one step: write the KV of the batch's tokens into the pool and give the logits that it asks for.

        Args:
            batch: the rows, the same on every rank.
            kv: this rank's pool; the slots of the batch are written.
            on_layer: called with a layer's index before the layer runs (a span of layers may run as one).

        Returns:
            f32 [R, vocab], the whole vocabulary on every rank.
        """
        hidden = self._embed(batch.tokens)
        delta = self._ops.run_layers(hidden, batch, kv, on_layer)
        return self._logits(hidden, delta, batch.logit_rows)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]. A rank looks up the tokens of its part of the vocabulary; the rest are zero."""
        embed, part = self._weights.embed, self.shard.vocab
        if self.shard.world == 1:
            return F.embedding(tokens, embed)
        mine = (tokens >= part.start) & (tokens < part.stop)
        found = F.embedding(torch.where(mine, tokens - part.start, 0), embed)
        found.masked_fill_(~mine[:, None], 0)
        self._group.all_reduce(found)
        return found

    def _logits(self, hidden: torch.Tensor, delta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vocab = self.config.vocab
        if not len(rows):
            return hidden.new_empty((0, vocab), dtype=torch.float32)
        normed = self._ops.add_norm(hidden[rows], delta[rows], self._weights.norm)
        logits = self._ops.head(normed)
        return logits if self.shard.world == 1 else self._group.all_gather(logits)[:, :vocab].contiguous()

    def paths(self) -> dict[str, str]:
        return self._ops.paths() | self._group.paths()
