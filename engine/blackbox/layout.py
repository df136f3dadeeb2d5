"""What lies where in a black box, byte by byte; and the numbers that its fields hold. Part of the format: a change of
anything here is a new VERSION."""

from __future__ import annotations

import enum
import struct

MAGIC = b"LBBX"
VERSION = 1
HEADER_BYTES = 4096
SETTINGS_OFFSET = 4096
SETTINGS_BYTES = 28672
HOST_OFFSET = 32768
DEVICE_OFFSET = 36864
RING_OFFSET = 40960
RING_SLOTS = 4096
SLOT_BYTES = 64
BOX_BYTES = RING_OFFSET + RING_SLOTS * SLOT_BYTES


class Phase(enum.IntEnum):
    """What a rank's main thread is doing. The names are part of the format."""

    load = 0
    capture = 1
    idle = 2
    recv = 3
    schedule = 4
    grammar = 5
    launch = 6
    wait_device = 7
    collective = 8
    results = 9
    transfer = 10


class DeviceState(enum.IntEnum):
    """What a rank's device stream is doing."""

    idle = 0
    compute = 1
    collective = 2


class EventKind(enum.IntEnum):
    """Ring events. The comment gives the meaning of ``sub``, ``flags`` and ``a, b, c, d``."""

    batch_begin = 1  # sub=BatchKind flags=requests a=step b=tokens laid out
    batch_request = 2  # flags=RequestFlag a=request hash b=kv length before c=tokens laid out d=of them drafted
    batch_end = 3  # sub=BatchKind flags=requests a=step b=useful tokens c=executed tokens
    collective_enqueued = 4  # sub=CollectiveKind flags=group a=sequence b=bytes c=step
    collective_completed = 5  # sub=CollectiveKind flags=group a=sequence b=bytes c=step
    fsm_advance = 6  # a=request hash b=tokens
    accepted = 7  # a=request hash b=accepted length c=kv length after d=step
    abort = 8  # a=request hash
    transfer = 9  # a=request hash b=bytes
    retract = 10  # a=request hash b=tokens given back
    prepare_begin = 11  # a=step that is being prepared
    prepare_end = 12  # a=step that is being prepared
    device_begin = 13  # a=step
    device_end = 14  # a=step


class BatchKind(enum.IntEnum):
    prefill = 1
    decode = 2
    verify = 3


class CollectiveKind(enum.IntEnum):
    all_reduce = 1
    all_gather = 2
    broadcast = 3
    barrier = 4


class RequestFlag(enum.IntFlag):
    grammar = 1
    prefill = 2
    warmup = 4


# Totals since start unless the name ends in a noun of state (pages_*, running, waiting).
COUNTERS: tuple[str, ...] = (
    "requests_received",
    "requests_finished",
    "requests_aborted",
    "requests_rejected",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "executed_tokens",
    "useful_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "retractions",
    "batches_prefill",
    "batches_decode",
    "batches_verify",
    "grammar_compiles",
    "grammar_failures",
    "pages_total",
    "pages_free",
    "pages_cached",
    "running",
    "waiting",
    "grammar_waiting",
    "pages_pending",
)

HEADER = struct.Struct("<4sHHIIQQ16s16s iiiii I 32s 16s 16s 64s")  # see Header
HOT = struct.Struct("<QQQQIIII")  # step, mono, progress mono, beats, phase, running, waiting, held
COUNTERS_RECORD = struct.Struct(f"<{len(COUNTERS)}Q")
PHASES_RECORD = struct.Struct(f"<{len(Phase) * 4}Q")  # for each phase: total ns, calls, rolling max ns, reserved
DEVICE = struct.Struct("<QQQQQQQQII")  # step, mono, enqueued, completed, bytes, layer, begun, ended, state, kind
SLOT = struct.Struct("<QQHHIQQQQQ")
U64 = struct.Struct("<Q")
HOT_AT = HOST_OFFSET + 64
COUNTERS_AT = HOST_OFFSET + 256
PHASES_AT = HOST_OFFSET + 1024
DEVICE_AT = DEVICE_OFFSET + 64
