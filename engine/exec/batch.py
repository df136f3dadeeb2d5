"""What one forward pass takes: the rows of a batch laid out for the device.

Rows lie one after another along T, the tokens of the step::

    tokens     | row 0: prefill chunk      | row 1 | row 2: verify   |     T = sum(query_lens)
    positions  | 128 129 ... 191           | 57    | 300 301 302 303 |
    slots      | where each token's K/V go: page * page_size + offset|

Row i has ``kv_lens[i]`` tokens in the cache after this step, of which the last ``query_lens[i]`` are these. Query
token j of row i stands at position ``kv_lens[i] - query_lens[i] + j`` and sees the KV of positions 0 to its own, which
page table row i maps: position p lies in slot ``page_tables[i, p // page_size] * page_size + p % page_size``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardBatch:
    """Rows may mix prefill chunks (with a prefix in the cache), single decode tokens and verifies of several tokens.

    Attributes:
        step: the engine's step number, for the black box.
        tokens: int64 [T].
        positions: int64 [T].
        slots: int64 [T], the KV slot of each token.
        query_lens: tokens of each row in this step; they sum to T.
        kv_lens: KV length of each row after this step.
        page_tables: int32 [B, P] page ids, padded with 0.
        page_size: tokens in a page.
        logit_rows: int64 [R], the indices along T whose logits are wanted.
    """

    step: int
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_tables: torch.Tensor
    page_size: int
    logit_rows: torch.Tensor

    def check(self) -> None:
        """Raise ValueError if the parts do not fit each other. Reads the tensors: for tests and drills."""
        total, rows = sum(self.query_lens), len(self.query_lens)

        def need(good: bool, text: str) -> None:
            if not good:
                raise ValueError(f"batch of step {self.step}: {text}")

        need(rows > 0 and len(self.kv_lens) == rows, f"{rows} query lengths, {len(self.kv_lens)} KV lengths")
        for name in ("tokens", "positions", "slots"):
            tensor: torch.Tensor = getattr(self, name)
            need(
                tensor.shape == (total,) and tensor.dtype == torch.int64,
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not int64 [{total}]",
            )
        need(self.page_tables.dim() == 2 and self.page_tables.shape[0] == rows and self.page_tables.dtype == torch.int32,
             f"page_tables is {self.page_tables.dtype} {list(self.page_tables.shape)}, not int32 [{rows}, P]")  # fmt: skip
        at = 0
        for row, (queries, length) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            need(0 < queries <= length, f"row {row} has {queries} tokens of a KV length of {length}")
            need(length <= self.page_tables.shape[1] * self.page_size, f"row {row}: {length} tokens do not fit its page table")
            positions = torch.arange(length - queries, length)
            pages = self.page_tables[row].cpu().long()[positions // self.page_size]
            need(
                torch.equal(self.positions[at : at + queries].cpu(), positions),
                f"row {row}: positions are not {length - queries}..{length - 1}",
            )
            need(torch.equal(self.slots[at : at + queries].cpu(), pages * self.page_size + positions % self.page_size),
                 f"row {row}: slots are not where its page table says")  # fmt: skip
            at += queries
        need(bool(((self.logit_rows >= 0) & (self.logit_rows < total)).all()), f"logit_rows are not all in 0..{total - 1}")
