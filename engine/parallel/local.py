"""Collectives among the ranks of one host, in C; ``futex.py`` has the same without a compiler.

All calls block until every rank of the host has made the same call with the same signature. A rank that makes another
call, or none, parks all of them without end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

import torch

from engine.native import collectives
from engine.parallel.block import SLOT_BYTES

_SPIN_TURNS = 400  # some 20 us: what a rank that comes a little later needs


class Local(Protocol):
    """``signature`` is a number below 2**64 that says kind, type and size. Tensors are contiguous, f32 or bf16."""

    name: str

    def all_reduce(self, x: torch.Tensor, signature: int) -> None:
        """Sum over the ranks, in place; the same bits on each."""
        ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        """``out`` [ranks, *x.shape]."""
        ...

    def broadcast(self, x: torch.Tensor, signature: int) -> None:
        """From the host's first rank to the others, in place."""
        ...


class NativeLocal:
    name = "shared memory, C"

    def __init__(self, library: ctypes.CDLL, block: mmap.mmap, rank: int, ranks: int) -> None:
        self._library = library
        self._block = block
        base = ctypes.addressof(ctypes.c_char.from_buffer(block))
        cores = len(os.sched_getaffinity(0))
        self._meeting = collectives.MeetingStruct(base, SLOT_BYTES, rank, ranks, _SPIN_TURNS if ranks <= cores else 0, 0, 0)
        self._pointer = ctypes.byref(self._meeting)

    def all_reduce(self, x: torch.Tensor, signature: int) -> None:
        self._library.lastbatch_all_reduce(self._pointer, signature, x.data_ptr(), x.nbytes, x.dtype is torch.bfloat16)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        self._library.lastbatch_all_gather(self._pointer, signature, x.data_ptr(), out.data_ptr(), x.nbytes)

    def broadcast(self, x: torch.Tensor, signature: int) -> None:
        self._library.lastbatch_broadcast(self._pointer, signature, x.data_ptr(), x.nbytes)


class AloneLocal:
    """A host with a single rank of the group: nothing to meet."""

    name = "one rank a host"

    def all_reduce(self, x: torch.Tensor, signature: int) -> None:
        pass

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        out[0].copy_(x)

    def broadcast(self, x: torch.Tensor, signature: int) -> None:
        pass
