"""The block of memory that the ranks of a host share: an anonymous file, handed from rank to rank.

The host's first rank makes a memfd and hands its descriptor over an abstract Unix socket. Neither has a name in any
file system, so nothing is left behind however a rank dies. The socket is open only while ranks gather, answers only
this user's processes, and each caller names its rank once.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time

from engine.native.collectives import HEADER_BYTES, MAX_RANKS

SLOT_BYTES = 512 * 1024
_HELLO = struct.Struct("<II")  # local rank, a number that the first rank hands to all (the port of its store)
_CREDENTIALS = struct.Struct("3i")


class BlockError(RuntimeError):
    """The ranks of a host did not come together; the text says who was missing."""


def open_block(name: str, local_rank: int, local_world: int, deadline: float, note: int = 0) -> tuple[mmap.mmap, int]:
    """Map the block that the ranks of this host share, and the first rank's ``note``.

    Args:
        name: the same for these ranks and for no others on the host.
        deadline: ``time.monotonic()`` by which all must have come.

    Raises:
        BlockError: the deadline passed.
    """
    if local_world > MAX_RANKS:
        raise BlockError(f"--tp: {local_world} ranks on one host, at most {MAX_RANKS} can share its memory; use more nodes")
    address = "\0" + name
    if local_rank == 0:
        return _hand_out(address, local_world, deadline, note)
    return _fetch(address, local_rank, deadline)


def _hand_out(address: str, local_world: int, deadline: float, note: int) -> tuple[mmap.mmap, int]:
    size = HEADER_BYTES + 2 * SLOT_BYTES * local_world
    descriptor = os.memfd_create("lastbatch-collectives", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        block = mmap.mmap(descriptor, size)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            try:
                server.bind(address)
            except OSError as error:
                raise BlockError(f"another rank 0 gathers under the same name ({address[1:]}): {error}") from error
            server.listen(local_world)
            missing = set(range(1, local_world))
            while missing:
                server.settimeout(_left(deadline, f"local ranks {sorted(missing)} have not come"))
                try:
                    caller, _ = server.accept()
                except TimeoutError:
                    continue
                with caller:
                    caller.settimeout(_left(deadline, f"local ranks {sorted(missing)} have not come"))
                    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                        continue
                    rank, _ = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL).ljust(_HELLO.size, b"\0"))
                    if rank in missing:
                        socket.send_fds(caller, [_HELLO.pack(rank, note)], [descriptor])
                        missing.discard(rank)
        return block, note
    finally:
        os.close(descriptor)


def _fetch(address: str, local_rank: int, deadline: float) -> tuple[mmap.mmap, int]:
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(_left(deadline, "the host's first rank does not answer"))
            try:
                caller.connect(address)
                caller.sendall(_HELLO.pack(local_rank, 0))
                data, descriptors, _, _ = socket.recv_fds(caller, _HELLO.size, 1)
            except (ConnectionError, TimeoutError):
                data, descriptors = b"", []
        if descriptors and len(data) == _HELLO.size:
            try:
                return mmap.mmap(descriptors[0], os.fstat(descriptors[0]).st_size), _HELLO.unpack(data)[1]
            finally:
                os.close(descriptors[0])
        time.sleep(0.01)


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise BlockError(f"{what}; see the other ranks' logs, or give more time with --rendezvous-timeout")
    return left
