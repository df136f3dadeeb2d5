"""What a reading of a black box holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.blackbox.layout import DeviceState, EventKind, Phase


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
