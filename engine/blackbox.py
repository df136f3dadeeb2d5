"""The flight recorder: one memory-mapped file a rank, readable by anyone while the rank is stuck.

A reader needs no ptrace, no signal and no answer from the process: it maps (or copies) the file. So the record
tells the truth about a rank that is wedged, stopped (state T) or dead, which is when it matters.

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

import contextlib
import enum
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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

_HEADER = struct.Struct("<4sHHIIQQ16s16s iiiii I 32s 16s 16s 64s")  # see Header
_HOT = struct.Struct("<QQQQIIII")  # step, mono, progress mono, beats, phase, running, waiting, held
_COUNTERS = struct.Struct(f"<{len(COUNTERS)}Q")
_PHASES = struct.Struct(f"<{len(Phase) * 4}Q")  # for each phase: total ns, calls, rolling max ns, reserved
_DEVICE = struct.Struct("<QQQQQQQQII")  # step, mono, enqueued, completed, bytes, layer, begun, ended, state, kind
_SLOT = struct.Struct("<QQHHIQQQQQ")
_U64 = struct.Struct("<Q")
_HOT_AT = HOST_OFFSET + 64
_COUNTERS_AT = HOST_OFFSET + 256
_PHASES_AT = HOST_OFFSET + 1024
_DEVICE_AT = DEVICE_OFFSET + 64
_ROLLING_NS = 30_000_000_000


class BoxError(ValueError):
    """A file is not a black box that this version can read; the text says which file and why."""


@dataclass(frozen=True)
class Header:
    """Who wrote the box. ``invocation_id`` is systemd's (32 hex digits) or the embedded supervisor's."""

    pid: int
    rank: int
    world: int
    config_digest: str
    invocation_id: str = ""
    dp: int = 0
    pp: int = 0
    tp: int = 0
    ep: int = 0
    node: int = 0
    role: str = "both"
    name: str = ""
    boot_id: str = ""
    start_mono_ns: int = 0
    start_unix_ns: int = 0


@dataclass(frozen=True)
class PhaseStat:
    total_ns: int
    calls: int
    rolling_max_ns: int


@dataclass(frozen=True)
class Host:
    """The main thread's record. ``progress_ns`` is when a batch last gave a result; ``held`` counts requests
    received and not yet answered (queued, compiling, running)."""

    step: int
    mono_ns: int
    progress_ns: int
    beats: int
    phase: Phase
    running: int
    waiting: int
    held: int
    counters: dict[str, int]
    phases: dict[Phase, PhaseStat]


@dataclass(frozen=True)
class DeviceRecord:
    """The stream thread's record. On CUDA an enqueued collective has only been handed to the device."""

    step: int
    mono_ns: int
    enqueued: int
    completed: int
    nbytes: int
    layer: int
    begun: int
    ended: int
    state: DeviceState
    kind: int


@dataclass(frozen=True)
class Event:
    n: int
    mono_ns: int
    kind: EventKind
    sub: int
    flags: int
    a: int
    b: int
    c: int
    d: int


@dataclass(frozen=True)
class Snapshot:
    """One consistent reading of a box. ``events`` are in order, oldest first, torn slots left out."""

    header: Header
    settings_json: str
    host: Host
    device: DeviceRecord
    events: tuple[Event, ...] = field(repr=False)

    def last_moved_ns(self) -> int:
        """When either thread of the rank last wrote its record (CLOCK_MONOTONIC of the writer's host)."""
        return max(self.host.mono_ns, self.device.mono_ns)

    def age_s(self, now_mono_ns: int) -> float:
        return (now_mono_ns - self.last_moved_ns()) / 1e9

    def last_batch(self) -> tuple[Event, tuple[Event, ...]] | None:
        """The latest ``batch_begin`` and the requests laid out in it; None if the ring holds none."""
        begin: Event | None = None
        requests: list[Event] = []
        for event in self.events:
            if event.kind is EventKind.batch_begin:
                begin, requests = event, []
            elif event.kind is EventKind.batch_request and begin is not None and len(requests) < begin.flags:
                requests.append(event)
        return (begin, tuple(requests)) if begin is not None else None

    def open_collective(self) -> Event | None:
        """The collective that was enqueued and has not completed, if there is one."""
        opened: Event | None = None
        for event in self.events:
            if event.kind is EventKind.collective_enqueued:
                opened = event
            elif event.kind is EventKind.collective_completed and opened is not None and event.a >= opened.a:
                opened = None
        return opened


def request_hash(rid: str) -> int:
    """64-bit FNV-1a of a request id: the box names requests by it, never by text."""
    value = 0xCBF29CE484222325
    for byte in rid.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


class BlackBox:
    """The writer. ``enter``, ``beat`` and ``publish`` are for the rank's main thread; ``device_*`` and
    ``collective_*`` for its stream thread; ``event`` for both. A write costs about a microsecond."""

    def __init__(self, path: Path, header: Header, settings_json: str = "{}") -> None:
        text = settings_json.encode()
        if len(text) > SETTINGS_BYTES - 4:
            raise BoxError(f"{path}: the configuration takes {len(text)} bytes, the box holds {SETTINGS_BYTES - 4}")
        self.path = path
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, BOX_BYTES)  # a full disk shows here, not as SIGBUS in mid-flight
            self._map = mmap.mmap(descriptor, BOX_BYTES)
        finally:
            os.close(descriptor)
        self._map[SETTINGS_OFFSET : SETTINGS_OFFSET + 4] = struct.pack("<I", len(text))
        self._map[SETTINGS_OFFSET + 4 : SETTINGS_OFFSET + 4 + len(text)] = text
        _pack_header(self._map, header)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._slots = itertools.count(1)
        self._host_lock = self._device_lock = self._beats = 0
        self._step = self._running = self._waiting = self._held = 0
        self._phase = Phase.load
        self._progress_ns = self._entered_ns = time.monotonic_ns()
        self._totals = [0] * (len(Phase) * 4)
        self._window_ns = self._entered_ns
        self._window_max = [0] * len(Phase)
        self._previous_max = [0] * len(Phase)
        self._device = [0] * 10
        self.beat()
        self.publish()
        self._write_device()
        scratch.rename(path)

    # The main thread.

    def enter(self, phase: Phase) -> None:
        """Close the phase that is running, add its time to the statistics, and write the new one."""
        now = time.monotonic_ns()
        spent = now - self._entered_ns
        old = self._phase
        at = old * 4
        self._totals[at] += spent
        self._totals[at + 1] += 1
        if spent > self._window_max[old]:
            self._window_max[old] = spent
        self._phase = phase
        self._entered_ns = now
        self._write_host(now)

    def beat(self, *, step: int | None = None, running: int | None = None, waiting: int | None = None,
             held: int | None = None, progress: bool = False) -> None:  # fmt: skip
        """Refresh the host record; ``progress`` says that a batch has just given its result."""
        now = time.monotonic_ns()
        if step is not None:
            self._step = step
        if running is not None:
            self._running = running
        if waiting is not None:
            self._waiting = waiting
        if held is not None:
            self._held = held
        if progress:
            self._progress_ns = now
        self._write_host(now)

    def publish(self) -> None:
        """Write the counters and phase statistics (once a step, and when idle)."""
        now = time.monotonic_ns()
        if now - self._window_ns > _ROLLING_NS:
            self._previous_max, self._window_max = self._window_max, [0] * len(Phase)
            self._window_ns = now
        for phase in range(len(Phase)):
            self._totals[phase * 4 + 2] = max(self._window_max[phase], self._previous_max[phase])
        self._host_lock += 2
        _U64.pack_into(self._map, HOST_OFFSET, self._host_lock - 1)
        _COUNTERS.pack_into(self._map, _COUNTERS_AT, *self.counters.values())
        _PHASES.pack_into(self._map, _PHASES_AT, *self._totals)
        _U64.pack_into(self._map, HOST_OFFSET, self._host_lock)

    def _write_host(self, now: int) -> None:
        self._beats += 1
        lock = self._host_lock = self._host_lock + 2
        _U64.pack_into(self._map, HOST_OFFSET, lock - 1)
        _HOT.pack_into(self._map, _HOT_AT, self._step, now, self._progress_ns, self._beats, self._phase,
                       self._running, self._waiting, self._held)  # fmt: skip
        _U64.pack_into(self._map, HOST_OFFSET, lock)

    # The stream thread.

    def device_begin(self, step: int) -> None:
        self._device[0] = step
        self._device[6] += 1
        self._device[8] = DeviceState.compute
        self._write_device()
        self.event(EventKind.device_begin, a=step)

    def device_layer(self, layer: int) -> None:
        """Mark that the forward pass has reached a layer: a long prefill is seen to move."""
        self._device[5] = layer
        self._write_device()

    def device_end(self, step: int) -> None:
        self._device[7] += 1
        self._device[8] = DeviceState.idle
        self._write_device()
        self.event(EventKind.device_end, a=step)

    def collective_enqueued(self, kind: int, sequence: int, nbytes: int, group: int = 0) -> None:
        """Record a collective before it is entered."""
        self._device[2] = sequence
        self._device[4] = nbytes
        self._device[8] = DeviceState.collective
        self._device[9] = kind
        self._write_device()
        self.event(EventKind.collective_enqueued, kind, group, sequence, nbytes, self._device[0])

    def collective_completed(self, kind: int, sequence: int, nbytes: int, group: int = 0) -> None:
        self._device[3] = sequence
        self._device[8] = DeviceState.compute
        self._write_device()
        self.event(EventKind.collective_completed, kind, group, sequence, nbytes, self._device[0])

    def _write_device(self) -> None:
        record = self._device
        record[1] = time.monotonic_ns()
        lock = self._device_lock = self._device_lock + 2
        _U64.pack_into(self._map, DEVICE_OFFSET, lock - 1)
        _DEVICE.pack_into(self._map, _DEVICE_AT, *record)
        _U64.pack_into(self._map, DEVICE_OFFSET, lock)

    # Both.

    def event(self, kind: EventKind, sub: int = 0, flags: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        n = next(self._slots)
        _SLOT.pack_into(self._map, RING_OFFSET + (n % RING_SLOTS) * SLOT_BYTES, n, time.monotonic_ns(), kind, sub,
                        flags, a, b, c, d, n)  # fmt: skip

    def close(self, *, unlink: bool = False) -> None:
        """Unmap. An ordered shutdown also removes the file; after a crash it stays as evidence."""
        self._map.flush()
        self._map.close()
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()


def _pack_header(target: mmap.mmap, header: Header) -> None:
    boot = (header.boot_id or _boot_id()).replace("-", "")
    _HEADER.pack_into(
        target, 0, MAGIC, VERSION, HEADER_BYTES, header.pid, RING_SLOTS,
        header.start_mono_ns or time.monotonic_ns(), header.start_unix_ns or time.time_ns(),
        bytes.fromhex(boot.ljust(32, "0")[:32]), bytes.fromhex((header.invocation_id or "").ljust(32, "0")[:32]),
        header.dp, header.pp, header.tp, header.ep, header.node, header.rank,
        header.config_digest.encode()[:32], str(header.world).encode(), header.role.encode()[:16], header.name.encode()[:64],
    )  # fmt: skip


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


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
    raw = _HEADER.unpack_from(view, 0)
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
    hot, counters, phases = _locked(view, HOST_OFFSET, ((_HOT, _HOT_AT), (_COUNTERS, _COUNTERS_AT), (_PHASES, _PHASES_AT)), source)
    (device,) = _locked(view, DEVICE_OFFSET, ((_DEVICE, _DEVICE_AT),), source)
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
        (before,) = _U64.unpack_from(view, lock_at)
        found = [record.unpack_from(view, at) for record, at in records]
        (after,) = _U64.unpack_from(view, lock_at)
        if before == after and (before % 2 == 0 or before == last):
            return found
        last = before if before % 2 else -1
        if before % 2:
            time.sleep(0.00002)
    raise BoxError(f"{source}: the writer never left the record at {lock_at} alone in 1000 tries")


def _events(view: bytes | mmap.mmap) -> Iterator[Event]:
    slots = []
    for at in range(RING_OFFSET, RING_OFFSET + RING_SLOTS * SLOT_BYTES, SLOT_BYTES):
        raw = _SLOT.unpack_from(view, at)
        if raw[0] and raw[0] == raw[9]:
            slots.append(raw)
    slots.sort()
    for raw in slots:
        with contextlib.suppress(ValueError):
            yield Event(raw[0], raw[1], EventKind(raw[2]), *raw[3:9])
