"""Reading a black box, by its path or from a copy, while its writer writes, stands still or is dead."""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.blackbox.layout import (
    BOX_BYTES,
    COUNTERS,
    COUNTERS_AT,
    COUNTERS_RECORD,
    DEVICE,
    DEVICE_AT,
    DEVICE_OFFSET,
    HEADER,
    HOST_OFFSET,
    HOT,
    HOT_AT,
    MAGIC,
    PHASES_AT,
    PHASES_RECORD,
    RING_OFFSET,
    RING_SLOTS,
    SETTINGS_BYTES,
    SETTINGS_OFFSET,
    SLOT,
    SLOT_BYTES,
    U64,
    VERSION,
    DeviceState,
    EventKind,
    Phase,
)
from engine.blackbox.records import BoxError, DeviceRecord, Event, Header, Host, PhaseStat, Snapshot


def read(path: Path | str, *, events: bool = True) -> Snapshot:
    """Read a box by path.

    Raises:
        BoxError: the file is missing, too short, of another format or version, or its writer never left a
            record alone long enough to be read (1,000 tries).
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _decode(view, str(path), events=events)
    except OSError as error:
        raise BoxError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, BoxError):
            raise
        raise BoxError(f"{path}: {error}") from error


def decode(data: bytes, source: str = "bytes") -> Snapshot:
    """Read a box from a copy of its bytes (a bundle's ``rank-<n>.box``). Raises BoxError."""
    return _decode(data, source, events=True)


def _decode(view: bytes | mmap.mmap, source: str, *, events: bool) -> Snapshot:
    if len(view) < BOX_BYTES:
        raise BoxError(f"{source}: {len(view)} bytes, a black box has {BOX_BYTES}")
    raw = HEADER.unpack_from(view, 0)
    if raw[0] != MAGIC:
        raise BoxError(f"{source}: does not begin with {MAGIC.decode()}, so it is no black box")
    if raw[1] != VERSION:
        raise BoxError(f"{source}: format version {raw[1]}, this reader knows {VERSION}")
    text = [part.rstrip(b"\0").decode(errors="replace") for part in raw[15:19]]
    invocation = raw[8].hex()
    header = Header(
        pid=raw[3], start_mono_ns=raw[5], start_unix_ns=raw[6], boot_id=raw[7].hex(),
        invocation_id="" if invocation == "0" * 32 else invocation,
        dp=raw[9], pp=raw[10], tp=raw[11], ep=raw[12], node=raw[13], rank=raw[14],
        config_digest=text[0], world=int(text[1] or 1), role=text[2], name=text[3],
    )  # fmt: skip
    (length,) = struct.unpack_from("<I", view, SETTINGS_OFFSET)
    if length > SETTINGS_BYTES - 4:
        raise BoxError(f"{source}: the settings claim {length} bytes, the box holds {SETTINGS_BYTES - 4}")
    settings = bytes(view[SETTINGS_OFFSET + 4 : SETTINGS_OFFSET + 4 + length]).decode(errors="replace")
    hot, counters, phases = _locked(view, HOST_OFFSET, ((HOT, HOT_AT), (COUNTERS_RECORD, COUNTERS_AT), (PHASES_RECORD, PHASES_AT)), source)
    (device,) = _locked(view, DEVICE_OFFSET, ((DEVICE, DEVICE_AT),), source)
    try:
        step, mono_ns, progress_ns, beats, phase, running, waiting, held = hot
        host = Host(step, mono_ns, progress_ns, beats, Phase(phase), running, waiting, held,
                    counters=dict(zip(COUNTERS, counters, strict=True)),
                    phases={p: PhaseStat(*phases[p * 4 : p * 4 + 3]) for p in Phase})  # fmt: skip
        step, mono_ns, enqueued, completed, nbytes, layer, begun, ended, state, kind = device
        record = DeviceRecord(step, mono_ns, enqueued, completed, nbytes, layer, begun, ended, DeviceState(state), kind)
    except ValueError as error:
        raise BoxError(f"{source}: {error}") from error
    return Snapshot(header, settings, host, record, tuple(_events(view)) if events else ())


def _locked(view: bytes | mmap.mmap, lock_at: int, records: Sequence[tuple[struct.Struct, int]], source: str) -> list[tuple[int, ...]]:
    """Read records under their sequence lock. A writer that died inside a write leaves the lock odd for ever:
    then, after the tries, the record is taken as it stands if the lock itself does not move."""
    last = -1
    for _ in range(1000):
        (before,) = U64.unpack_from(view, lock_at)
        found = [record.unpack_from(view, at) for record, at in records]
        (after,) = U64.unpack_from(view, lock_at)
        if before == after and (before % 2 == 0 or before == last):
            return found
        last = before if before % 2 else -1
        if before % 2:
            time.sleep(0.00002)
    raise BoxError(f"{source}: the writer never left the record at {lock_at} alone in 1000 tries")


def _events(view: bytes | mmap.mmap) -> Iterator[Event]:
    slots = []
    for at in range(RING_OFFSET, RING_OFFSET + RING_SLOTS * SLOT_BYTES, SLOT_BYTES):
        raw = SLOT.unpack_from(view, at)
        if raw[0] and raw[0] == raw[9]:
            slots.append(raw)
    slots.sort()
    for raw in slots:
        with contextlib.suppress(ValueError):
            yield Event(raw[0], raw[1], EventKind(raw[2]), *raw[3:9])
