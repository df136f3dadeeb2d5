"""Signatures of collectives.c."""

from __future__ import annotations

import ctypes

from engine.native.build import library

HEADER_BYTES = 4096
LINE_BYTES = 64  # rank r's line (step, signature: u64 each) begins at LINE_BYTES * (1 + r)
MAX_RANKS = 63


class MeetingStruct(ctypes.Structure):
    """``meeting_t``: where the ranks of a host meet, and how far this one has come."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("spin", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("step", ctypes.c_uint64),
    )


def load() -> ctypes.CDLL | None:
    """The library with its signatures set. Calls release the GIL."""
    found = library("collectives")
    if found is None:
        return None
    meeting, signature, data, size = ctypes.POINTER(MeetingStruct), ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64
    found.lastbatch_all_reduce.argtypes = (meeting, signature, data, size, ctypes.c_int32)
    found.lastbatch_all_gather.argtypes = (meeting, signature, data, data, size)
    found.lastbatch_broadcast.argtypes = (meeting, signature, data, size)
    for function in (found.lastbatch_all_reduce, found.lastbatch_all_gather, found.lastbatch_broadcast):
        function.restype = None
    return found
