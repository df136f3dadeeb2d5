"""Bit masks over the vocabulary: which tokens a grammar allows, one row for each token to draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALL_ALLOWED = -1
"""A mask word with every bit set."""


def words(vocab_size: int) -> int:
    """How many int32 words a row has."""
    return (vocab_size + 31) // 32


def allocate_mask(rows: int, vocab_size: int) -> torch.Tensor:
    """int32 [rows, words] on the CPU, everything allowed."""
    return torch.full((rows, words(vocab_size)), ALL_ALLOWED, dtype=torch.int32)


def set_only(row: torch.Tensor, tokens: Sequence[int]) -> None:
    """Allow these tokens and no other in one row, int32 [words]."""
    row.zero_()
    for token in tokens:
        word, bit = divmod(token, 32)
        value = (int(row[word]) & 0xFFFFFFFF) | (1 << bit)
        row[word] = value - (1 << 32) if value >= 1 << 31 else value


def allowed_tokens(row: torch.Tensor, vocab_size: int) -> list[int]:
    """The ids that one row, int32 [words], allows."""
    bits = (row[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    found: list[int] = torch.nonzero(bits.flatten()[:vocab_size]).flatten().tolist()
    return found


def apply_masks(logits: torch.Tensor, masks: torch.Tensor, rows: Sequence[int] | None = None) -> None:
    """Make the logits of what is not allowed -inf, in place.

    Args:
        logits: f32 [R, V].
        masks: int32 [R, words]; moved to the device of ``logits``.
        rows: which rows (of both) to do; None: those whose mask rules something out.
    """
    import xgrammar

    if rows is None:
        rows = torch.nonzero((masks != ALL_ALLOWED).any(dim=1)).squeeze(1).tolist()
    if rows:
        xgrammar.apply_token_bitmask_inplace(logits, masks.to(logits.device), indices=list(rows))
