"""Paged attention in torch: the reference, and the CUDA path.

What does not change from layer to layer (which KV slots a row sees, and the mask) is planned once a step. Rows of few
query tokens (decode, verify) are padded and run together; prefill chunks run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.exec.batch import ForwardBatch

_FEW_QUERIES = 8


@dataclass(frozen=True)
class _Part:
    """Rows that run together. ``queries`` int64 [b, Q] indices along T, padded with the row's last;
    ``slots`` int64 [b, L] KV slots; ``mask`` bool [b, 1, Q, L]; ``real`` bool [b, Q]."""

    queries: torch.Tensor
    slots: torch.Tensor
    masks: dict[int, torch.Tensor]
    real: torch.Tensor


class AttentionPlan:
    """What attention needs to know about a batch. ``windows`` are the distinct sliding windows (0: none)."""

    def __init__(self, batch: ForwardBatch, windows: frozenset[int]) -> None:
        few = [row for row, count in enumerate(batch.query_lens) if count <= _FEW_QUERIES]
        many = [row for row, count in enumerate(batch.query_lens) if count > _FEW_QUERIES]
        starts = [0]
        for count in batch.query_lens:
            starts.append(starts[-1] + count)
        groups = ([few] if few else []) + [[row] for row in many]
        self.parts = [_part(batch, rows, starts, windows) for rows in groups]


def _part(batch: ForwardBatch, rows: list[int], starts: list[int], windows: frozenset[int]) -> _Part:
    device = batch.tokens.device
    counts = torch.tensor([batch.query_lens[row] for row in rows], device=device)
    lengths = torch.tensor([batch.kv_lens[row] for row in rows], device=device)
    first = torch.tensor([starts[row] for row in rows], device=device)
    most_queries = max(batch.query_lens[row] for row in rows)
    most_keys = max(batch.kv_lens[row] for row in rows)
    offsets = torch.arange(most_queries, device=device)
    real = offsets < counts[:, None]
    queries = first[:, None] + torch.minimum(offsets, counts[:, None] - 1)
    pages = batch.page_tables[rows, : -(-most_keys // batch.page_size)].long()
    slots = (pages[:, :, None] * batch.page_size + torch.arange(batch.page_size, device=device)).flatten(1)[:, :most_keys]
    positions = (lengths - counts)[:, None] + torch.minimum(offsets, counts[:, None] - 1)
    seen = torch.arange(most_keys, device=device)
    causal = seen <= positions[:, :, None]
    masks = {window: (causal & (seen > positions[:, :, None] - window) if window else causal)[:, None] for window in windows}
    return _Part(queries, slots, masks, real)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, window: int, scale: float) -> torch.Tensor:
    """Attention of ``q`` [T, heads, head_dim] over the cache of one layer, [slots, kv_heads, head_dim] each.

    Returns [T, heads, head_dim]. Query head h reads key/value head ``h * kv_heads // heads``.
    """
    out = torch.empty_like(q)
    for part in plan.parts:
        found = F.scaled_dot_product_attention(
            q[part.queries].transpose(1, 2), keys[part.slots].transpose(1, 2), values[part.slots].transpose(1, 2),
            attn_mask=part.masks[window], scale=scale, enable_gqa=q.shape[1] != keys.shape[1],
        )  # fmt: skip
        out[part.queries[part.real]] = found.transpose(1, 2)[part.real]
    return out
