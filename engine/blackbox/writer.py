"""Writing a black box: one writer for each record, about a microsecond a write."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import time
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
    HEADER_BYTES,
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
from engine.blackbox.records import BoxError, Header

_ROLLING_NS = 30_000_000_000


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
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise BoxError(f"{path}: {error.strerror}; a black box takes {BOX_BYTES} bytes") from error
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
        U64.pack_into(self._map, HOST_OFFSET, self._host_lock - 1)
        COUNTERS_RECORD.pack_into(self._map, COUNTERS_AT, *self.counters.values())
        PHASES_RECORD.pack_into(self._map, PHASES_AT, *self._totals)
        U64.pack_into(self._map, HOST_OFFSET, self._host_lock)

    def _write_host(self, now: int) -> None:
        self._beats += 1
        lock = self._host_lock = self._host_lock + 2
        U64.pack_into(self._map, HOST_OFFSET, lock - 1)
        HOT.pack_into(self._map, HOT_AT, self._step, now, self._progress_ns, self._beats, self._phase,
                       self._running, self._waiting, self._held)  # fmt: skip
        U64.pack_into(self._map, HOST_OFFSET, lock)

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
        U64.pack_into(self._map, DEVICE_OFFSET, lock - 1)
        DEVICE.pack_into(self._map, DEVICE_AT, *record)
        U64.pack_into(self._map, DEVICE_OFFSET, lock)

    # Both.

    def event(self, kind: EventKind, sub: int = 0, flags: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        n = next(self._slots)
        SLOT.pack_into(self._map, RING_OFFSET + (n % RING_SLOTS) * SLOT_BYTES, n, time.monotonic_ns(), kind, sub,
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
    HEADER.pack_into(
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
