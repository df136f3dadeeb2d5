"""The flight recorder: one memory-mapped file a rank, readable by anyone while the rank is stuck.

A reader needs no ptrace, no signal and no answer from the process: it maps (or copies) the file. So the record
tells the truth about a rank that is wedged, stopped (state T) or dead, which is when it matters.

``layout.py`` says what lies where, ``writer.py`` writes and ``reader.py`` reads.

Layout, little-endian, fixed offsets::

    0       header        who this is: pid, start, invocation, coordinates, configuration digest     4 KiB
    4096    settings      the declared configuration as JSON (a process title blanks /proc/PID/cmdline)  28 KiB
    32768   host record   the main thread: step, phase, counters, phase statistics (sequence lock)    4 KiB
    36864   device record the stream thread: batch, collective sequence numbers    (sequence lock)    4 KiB
    40960   ring          the last 4,096 events of 64 bytes                                           256 KiB

Each record has one writer: the host record belongs to the rank's main thread, the device record to its stream
thread. Both append to the ring, whose slots are claimed by an atomic counter. A slot carries its number first and
last; a slot whose two numbers differ was torn and is left out by readers.

Times are CLOCK_MONOTONIC in nanoseconds on the writer's host. They compare across the ranks of one host only.
"""

from __future__ import annotations

from engine.blackbox.layout import (
    BOX_BYTES,
    COUNTERS,
    DEVICE_OFFSET,
    HEADER_BYTES,
    HOST_OFFSET,
    MAGIC,
    RING_OFFSET,
    RING_SLOTS,
    SETTINGS_BYTES,
    SETTINGS_OFFSET,
    SLOT_BYTES,
    VERSION,
    BatchKind,
    CollectiveKind,
    DeviceState,
    EventKind,
    Phase,
    RequestFlag,
)
from engine.blackbox.reader import (
    decode,
    read,
)
from engine.blackbox.records import (
    BoxError,
    DeviceRecord,
    Event,
    Header,
    Host,
    PhaseStat,
    Snapshot,
    request_hash,
)
from engine.blackbox.writer import (
    BlackBox,
)

__all__ = [
    "BOX_BYTES",
    "COUNTERS",
    "DEVICE_OFFSET",
    "HEADER_BYTES",
    "HOST_OFFSET",
    "MAGIC",
    "RING_OFFSET",
    "RING_SLOTS",
    "SETTINGS_BYTES",
    "SETTINGS_OFFSET",
    "SLOT_BYTES",
    "VERSION",
    "BatchKind",
    "BlackBox",
    "BoxError",
    "CollectiveKind",
    "DeviceRecord",
    "DeviceState",
    "Event",
    "EventKind",
    "Header",
    "Host",
    "Phase",
    "PhaseStat",
    "RequestFlag",
    "Snapshot",
    "decode",
    "read",
    "request_hash",
]
