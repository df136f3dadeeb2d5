"""Laying rows out for the device: from each row's tokens and page table to one ``ForwardBatch``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.exec.batch import ForwardBatch


@dataclass(frozen=True)
class Segment:
    """One row: ``tokens`` stand at positions ``start`` and on; logits are wanted of the last ``logits`` of them."""

    tokens: Sequence[int]
    start: int
    pages: npt.NDArray[np.int32]
    logits: int


def lay_out(step: int, segments: Sequence[Segment], page_size: int, device: torch.device) -> ForwardBatch:
    """Raises ValueError when a row does not fit its page table."""
    total = sum(len(segment.tokens) for segment in segments)
    tokens = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    slots = np.empty(total, np.int64)
    tables = np.zeros((len(segments), max(-(-(s.start + len(s.tokens)) // page_size) for s in segments)), np.int32)
    wanted: list[int] = []
    at = 0
    for row, segment in enumerate(segments):
        count = len(segment.tokens)
        end = segment.start + count
        used = -(-end // page_size)
        if used > len(segment.pages):
            raise ValueError(f"step {step}: row {row} ends at token {end}, its page table holds {len(segment.pages) * page_size}")
        where = np.arange(segment.start, end)
        tokens[at : at + count] = segment.tokens
        positions[at : at + count] = where
        slots[at : at + count] = segment.pages[where // page_size].astype(np.int64) * page_size + where % page_size
        tables[row, :used] = segment.pages[:used]
        at += count
        wanted.extend(range(at - segment.logits, at))
    return ForwardBatch(
        step=step, tokens=torch.from_numpy(tokens).to(device), positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device), query_lens=tuple(len(s.tokens) for s in segments),
        kv_lens=tuple(s.start + len(s.tokens) for s in segments), page_tables=torch.from_numpy(tables).to(device),
        page_size=page_size, logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
    )  # fmt: skip
