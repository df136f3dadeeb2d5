"""Black boxes across nodes: every other node sends its ranks' records to node 0, which keeps them beside its own.

Node 0's health, metrics and watchdog then read one folder for the whole group. Times are moved to node 0's clock as
they arrive, so an age is an age. The link doubles as a sign of life: the group is one failure unit, and a node that
falls silent takes the rest down with it. So does one that comes back as another start: a service manager may bring it
back sooner than its silence is noticed, and its new ranks cannot join a group that has lost the old ones. The way back
says whether node 0 is ready: no node is before it.

Files: ``remote-rank-<n>.box``, header and records without the ring (the ring stays on its own node).
"""

from __future__ import annotations

import logging
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from engine import blackbox
from engine.config import Settings
from engine.parallel.secret import GroupSecret

_log = logging.getLogger("engine.launcher")

_SEND_S = 0.5
_MONO = struct.Struct("<Q")
# Where the records hold CLOCK_MONOTONIC: host mono and progress, device mono, start.
_TIMES_AT = (blackbox.HOST_OFFSET + 72, blackbox.HOST_OFFSET + 80, blackbox.DEVICE_OFFSET + 72, 16)


class Report(msgspec.Struct, tag=True):
    """``start``: which start of that node's launcher this is. ``group``: the start of node 0 that it belongs to, empty
    until it was answered."""

    node: int
    start: str
    group: str
    mono_ns: int
    boxes: dict[int, bytes]
    ending: bool = False


class Answer(msgspec.Struct, tag=True):
    start: str
    ending: bool
    ready: bool


@dataclass(frozen=True)
class PeerEnd:
    """Why the group must end. ``announced``: the other node said so itself; else it is lost, which wants evidence."""

    why: str
    announced: bool = False


def _port(settings: Settings) -> tuple[str, int]:
    host, port = settings.parallel.dist_init_addr.rsplit(":", 1)
    return host, int(port) + 3


def shifted(record: bytes, offset_ns: int) -> bytes:
    """The records of a box with their times moved by ``offset_ns``."""
    moved = bytearray(record[: blackbox.RING_OFFSET])
    for at in _TIMES_AT:
        (value,) = _MONO.unpack_from(moved, at)
        _MONO.pack_into(moved, at, max(0, value + offset_ns))
    return bytes(moved) + bytes(blackbox.BOX_BYTES - blackbox.RING_OFFSET)


class Hub:
    """Node 0's end. ``start`` is unique to this launcher. ``silent_s``: a node that has spoken and then not for this
    long counts as lost. ``ready``: what the other nodes are told; they are ready when node 0 is."""

    ready = False

    def __init__(self, settings: Settings, run_dir: Path, start: str, *, silent_s: float = 10.0) -> None:
        secret = GroupSecret.of(settings)
        self._settings = settings
        self._warned = False
        self._run_dir = run_dir
        self._start = start
        self._silent_s = silent_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        if secret is not None:
            secret.guard(self._socket)
        self._socket.bind(f"tcp://*:{_port(settings)[1]}")
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._starts: dict[int, str] = {}
        self._ending = False

    def turn(self) -> PeerEnd | None:
        """Take what has come; returns why the group must end, if it must."""
        while self._socket.poll(0):
            report, name = self._read()
            if report is None:
                continue
            if report.group not in ("", self._start):  # left over from the group before: it hears so, and ends
                self._answer(name)
                continue
            if self._starts.setdefault(report.node, report.start) != report.start:
                self._ending = True
                self._answer(name)
                return PeerEnd(f"node {report.node} was started again")
            if report.ending:
                return PeerEnd(f"node {report.node} is ending", announced=True)
            offset = time.monotonic_ns() - report.mono_ns
            for rank, record in report.boxes.items():
                target = self._run_dir / f"remote-rank-{rank}.box"
                scratch = target.with_suffix(".new")
                scratch.write_bytes(shifted(record, offset))
                scratch.rename(target)
            self._seen[report.node] = (name, time.monotonic())
            self._answer(name)
        for node, (_, seen) in self._seen.items():
            if time.monotonic() - seen > self._silent_s:
                return PeerEnd(f"node {node} has been silent for {self._silent_s:g} s")
        return None

    def _read(self) -> tuple[Report | None, bytes]:
        """The next report, or None: anybody who reaches the port can send anything, and must not end the group."""
        name, *frames = self._socket.recv_multipart()
        try:
            report = self._decoder.decode(frames[0]) if len(frames) == 1 else None
        except msgspec.DecodeError:
            report = None
        if report is None or not self._is_of_the_group(report):
            if not self._warned:
                _log.warning("something that is no node of this group speaks to the relay port; it is not listened to")
            self._warned = True
            return None, name
        return report, name

    def _is_of_the_group(self, report: Report) -> bool:
        parallel = self._settings.parallel
        ranks = report.boxes
        return 0 < report.node < parallel.nnodes and all(
            0 <= rank < parallel.tp and self._settings.node_of(rank) == report.node for rank in ranks
        )

    def end(self) -> None:
        """Tell every node that the group ends."""
        self._ending = True
        for name, _ in self._seen.values():
            self._answer(name)

    def _answer(self, name: bytes) -> None:
        self._socket.send_multipart((name, msgspec.msgpack.encode(Answer(self._start, self._ending, self.ready))))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        for left in self._run_dir.glob("remote-rank-*"):
            left.unlink(missing_ok=True)


class Spoke:
    """Another node's end. ``start`` is unique to this launcher. Node 0 may be silent for ``silent_s``, for longer while
    it has not answered yet. ``ready``: node 0 has said that it serves."""

    ready = False

    def __init__(self, settings: Settings, run_dir: Path, start: str, *, silent_s: float = 10.0) -> None:
        secret = GroupSecret.of(settings)
        self._settings = settings
        self._start = start
        self._run_dir = run_dir
        self._silent_s = silent_s
        self._patience_s = settings.parallel.rendezvous_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        if secret is not None:
            secret.enter(self._socket)
        host, port = _port(settings)
        self._socket.connect(f"tcp://{host}:{port}")
        self._sent = 0.0
        self._heard = time.monotonic()
        self._node_0_start = ""
        self._ending = False

    @property
    def answered(self) -> bool:
        """Whether node 0 has been heard at all."""
        return bool(self._node_0_start)

    def turn(self) -> PeerEnd | None:
        """Send what is due; returns why this node must end, if it must."""
        now = time.monotonic()
        if now - self._sent >= _SEND_S:
            self._sent = now
            self._send()
        while self._socket.poll(0):
            answer = msgspec.msgpack.decode(self._socket.recv(), type=Answer)
            if self._node_0_start not in ("", answer.start):
                return PeerEnd("node 0 was started again")
            self._heard, self._node_0_start, self.ready = now, answer.start, answer.ready
            if answer.ending:
                return PeerEnd("node 0 is ending", announced=True)
        patience = self._silent_s if self.answered else self._patience_s
        if now - self._heard > patience and not self._ending:  # node 0 drains meanwhile, and says nothing
            return PeerEnd(f"node 0 has been silent for {patience:g} s")
        return None

    def end(self) -> None:
        """Tell node 0 that this node ends, so that the group does."""
        self._ending = True
        self._send()

    def _send(self) -> None:
        boxes = {}
        for rank in self._settings.local_ranks:
            try:
                with (self._run_dir / f"rank-{rank}.box").open("rb") as file:
                    boxes[rank] = file.read(blackbox.RING_OFFSET)
            except OSError:
                continue
        report = Report(self._settings.parallel.node_rank, self._start, self._node_0_start, time.monotonic_ns(), boxes, self._ending)
        try:
            self._socket.send(msgspec.msgpack.encode(report), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        self._socket.close()
        self._context.term()
