"""The link from rank 0 to the other ranks: ordered, reliable, and never waited for without a deadline.

Rank 0 binds a ZMQ ROUTER, every other rank connects a DEALER named by its number. One host: a socket in the private
socket folder; several: TCP to the third port after ``--dist-init-addr``'s (PORT+2).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq

from engine.config import Settings
from engine.parallel.secret import GroupSecret
from engine.scheduler.plan import Hello, RankMessage, Stop, decode, encode


class RankLinkError(RuntimeError):
    """A rank did not come, or can no longer be reached."""


def address(settings: Settings, sockets: Path, *, bind: bool) -> str:
    if settings.parallel.nnodes == 1:
        return f"ipc://{sockets}/ranks.sock"
    host, port = settings.parallel.dist_init_addr.rsplit(":", 1)
    return f"tcp://{'*' if bind else host}:{int(port) + 2}"


class RankHub:
    """Rank 0's end."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], where: str, ranks: Iterable[int], secret: GroupSecret | None = None
    ) -> None:
        self._names = {rank: str(rank).encode() for rank in ranks}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if secret is not None:
            secret.guard(self._socket)
        self._socket.bind(where)

    def gather(self, deadline_s: float) -> list[Hello]:
        """Wait until every rank has said hello.

        Raises:
            RankLinkError: naming the ranks that did not come in time.
        """
        until = time.monotonic() + deadline_s
        found: dict[int, Hello] = {}
        while len(found) < len(self._names):
            left = until - time.monotonic()
            if left <= 0 or not self._socket.poll(int(left * 1000)):
                missing = sorted(set(self._names) - set(found))
                raise RankLinkError(f"--rendezvous-timeout: rank {', '.join(map(str, missing))} did not come in {deadline_s:g} s")
            frames = self._socket.recv_multipart()
            try:
                message = decode(frames[-1])
            except msgspec.DecodeError:
                continue  # no rank of ours: whoever reaches the port can send anything
            if isinstance(message, Hello) and message.info.rank in self._names:
                found[message.info.rank] = message
        return [found[rank] for rank in sorted(found)]

    def send(self, message: RankMessage) -> None:
        """Send to every rank. Raises RankLinkError for a rank whose connection is gone."""
        frame = encode(message)
        for rank, name in self._names.items():
            try:
                self._socket.send_multipart((name, frame), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankLinkError(f"rank {rank} cannot be reached: {error}") from error

    def stop(self) -> None:
        """Tell every rank to stop. One that is gone has done so."""
        for name in self._names.values():
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart((name, encode(Stop())), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class RankSpoke:
    """Another rank's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], where: str, rank: int, secret: GroupSecret | None = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if secret is not None:
            secret.enter(self.socket)
        self.socket.connect(where)

    def hello(self, hello: Hello) -> None:
        self.socket.send(encode(hello))

    def receive(self, timeout_s: float) -> RankMessage | None:
        """The next message, or None when none comes in time."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return decode(self.socket.recv())

    def close(self) -> None:
        self.socket.close()
