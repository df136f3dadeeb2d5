"""Collectives among the ranks of one host without a C compiler: tensors over the shared block, futex by ctypes.

Memory layout and protocol are those of engine/native/collectives.c. Python cannot add atomically, so a ring of the
bell may be lost; waiters look again each 10 ms.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

import torch

from engine.native.collectives import HEADER_BYTES, LINE_BYTES
from engine.parallel.block import SLOT_BYTES

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_LOOK_AGAIN_NS = 10_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexLocal:
    name = "shared memory, Python"

    def __init__(self, block: mmap.mmap, rank: int, ranks: int) -> None:
        call = _FUTEX_CALL.get(platform.machine())
        if call is None:
            raise RuntimeError(f"futex: no system call number known for {platform.machine()}; install a C compiler")
        self._call = call
        self._libc = ctypes.CDLL(None)
        self._raw = torch.frombuffer(block, dtype=torch.uint8)
        self._rank = rank
        self._ranks = ranks
        self._step = 0
        self._bell = ctypes.c_uint32.from_buffer(block, 0)
        self._bell_address = ctypes.c_void_p(ctypes.addressof(self._bell))
        self._lines = [(ctypes.c_uint64 * 2).from_buffer(block, LINE_BYTES * (1 + r)) for r in range(ranks)]
        self._peers = [r for r in range(ranks) if r != rank]
        self._pause = _Timespec(0, _LOOK_AGAIN_NS)

    def all_reduce(self, x: torch.Tensor, signature: int) -> None:
        for piece in _pieces(x):
            slots = self._meet(piece, signature)
            total = slots[0].float()
            for slot in slots[1:]:
                total = total + slot.float()
            piece.copy_(total)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        rows = out.view(self._ranks, -1)
        at = 0
        for piece in _pieces(x):
            for row, slot in zip(rows, self._meet(piece, signature), strict=True):
                row[at : at + len(piece)].copy_(slot)
            at += len(piece)

    def broadcast(self, x: torch.Tensor, signature: int) -> None:
        for piece in _pieces(x):
            piece.copy_(self._meet(piece, signature)[0])

    def _meet(self, piece: torch.Tensor, signature: int) -> list[torch.Tensor]:
        """Publish ``piece`` and wait for the others; every rank's slot of this step."""
        self._step += 1
        step = self._step
        slots = [self._slot(r, step, piece) for r in range(self._ranks)]
        slots[self._rank].copy_(piece)
        line = self._lines[self._rank]
        line[1] = signature
        line[0] = step
        self._bell.value += 1
        self._libc.syscall(self._call, self._bell_address, _WAKE, 1 << 30, None, None, 0)
        for peer in self._peers:
            there = self._lines[peer]
            while True:
                bell = self._bell.value
                reached = there[0]
                if reached == step + 1 or (reached == step and there[1] == signature):
                    break
                self._libc.syscall(self._call, self._bell_address, _WAIT, ctypes.c_uint32(bell), ctypes.byref(self._pause), None, 0)
        return slots

    def _slot(self, rank: int, step: int, piece: torch.Tensor) -> torch.Tensor:
        at = HEADER_BYTES + (rank * 2 + step % 2) * SLOT_BYTES
        return self._raw[at : at + piece.nbytes].view(piece.dtype)


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x.view(-1), SLOT_BYTES // x.dtype.itemsize)
