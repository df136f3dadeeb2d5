"""Collectives between hosts, over TCP: each host's first rank sends to node 0, which combines and answers all.

A frame is a header (the group's token, sequence, signature, size) and its payload. Node 0 answers nobody until all
have sent the header that it expects: with a mismatch everyone stays where a normal wait stands too, in ``_receive``.
A connection that breaks raises: unlike a rank of this host, whose parent sees it die, a dead node has no witness here.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch

_HEADER = struct.Struct("<16sQQQ")
_HELLO = struct.Struct("<16sI")
_HELLO_S = 2.0


class StarError(RuntimeError):
    """A node did not come, or its connection broke."""


class Star:
    """``links`` are node 0's connections to nodes 1.., in order; another node's to node 0."""

    def __init__(self, node: int, links: Sequence[socket.socket], token: bytes) -> None:
        self._node = node
        self._links = tuple(links)
        self._token = token

    @staticmethod
    def open(node: int, nodes: int, host: str, port: int, token: bytes, deadline: float) -> Star:
        """Connect the nodes' first ranks. ``deadline`` is a ``time.monotonic()``; ``token`` 16 bytes, the same on all.

        Raises:
            StarError: the deadline passed, or the port is taken.
        """
        links = _accept(nodes, host, port, token, deadline) if node == 0 else [_connect(node, host, port, token, deadline)]
        for link in links:
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
        return Star(node, links, token)

    def all_reduce(self, x: torch.Tensor, sequence: int, signature: int) -> None:
        """Sum over the nodes, in node order and in f32, in place; the same bits on each."""
        mine = _bytes(x)
        header = _HEADER.pack(self._token, sequence, signature, len(mine))
        if self._node:
            self._ask(header, mine, header, mine)
            return
        theirs = torch.empty_like(x)
        total = x.float() if x.dtype is not torch.float32 else x
        for link in self._links:
            _receive(link, bytearray(len(header)), header)
            _receive(link, _bytes(theirs))
            total += theirs
        if total is not x:
            x.copy_(total)
        self._answer(header, mine)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, counts: Sequence[int], sequence: int, signature: int) -> None:
        """``x`` [ranks of this node, n] into ``out`` [all ranks, n]; ``counts`` are the ranks of each node."""
        answer = _HEADER.pack(self._token, sequence, signature, out.nbytes)
        if self._node:
            self._ask(_HEADER.pack(self._token, sequence, signature, x.nbytes), _bytes(x), answer, _bytes(out))
            return
        out[: counts[0]].copy_(x)
        at = counts[0]
        for link, count in zip(self._links, counts[1:], strict=True):
            part = _bytes(out[at : at + count])
            header = _HEADER.pack(self._token, sequence, signature, len(part))
            _receive(link, bytearray(len(header)), header)
            _receive(link, part)
            at += count
        self._answer(answer, _bytes(out))

    def _ask(self, header: bytes, payload: memoryview, answer: bytes, into: memoryview) -> None:
        (link,) = self._links
        _send(link, header, payload)
        _receive(link, bytearray(len(answer)), answer)
        _receive(link, into)

    def _answer(self, header: bytes, payload: memoryview) -> None:
        for link in self._links:
            _send(link, header, payload)

    def close(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.close()


def _bytes(x: torch.Tensor) -> memoryview:
    raw: Any = x.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _send(link: socket.socket, header: bytes, payload: memoryview) -> None:
    try:
        sent = link.sendmsg([header, payload])
        if sent < len(header):
            link.sendall(header[sent:])
            sent = len(header)
        link.sendall(payload[sent - len(header) :])
    except OSError as error:
        raise StarError(f"the connection to node {_peer(link)} broke in the middle of a collective: {error}") from error


def _receive(link: socket.socket, into: bytearray | memoryview, expected: bytes | None = None) -> None:
    """Fill ``into``. If it must be ``expected`` and is not, this waits for ever, as for one that never comes."""
    view = memoryview(into)
    while view:
        try:
            count = link.recv_into(view)
        except OSError as error:
            raise StarError(f"the connection to {_peer(link)} broke in the middle of a collective: {error}") from error
        if not count:
            raise StarError(f"{_peer(link)} closed its connection in the middle of a collective")
        view = view[count:]
        if not view and expected is not None and bytes(into) != expected:
            view = memoryview(into)


def _peer(link: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return ":".join(map(str, link.getpeername()[:2]))
    return "a closed peer"


def _accept(nodes: int, host: str, port: int, token: bytes, deadline: float) -> list[socket.socket]:
    found: dict[int, socket.socket] = {}
    try:
        server = socket.create_server((host, port), backlog=nodes)
    except OSError as error:
        raise StarError(f"--dist-init-addr: cannot listen on {host}:{port} (the port after the one given): {error}") from error
    with server:
        while len(found) < nodes - 1:
            missing = [n for n in range(1, nodes) if n not in found]
            server.settimeout(_left(deadline, f"nodes {missing} have not connected to {host}:{port}"))
            try:
                link, _ = server.accept()
            except OSError:
                continue
            try:
                link.settimeout(_HELLO_S)  # a stranger that says nothing must not keep the others waiting
                their_token, node = _HELLO.unpack(link.recv(_HELLO.size, socket.MSG_WAITALL))
            except (OSError, struct.error):
                link.close()
                continue
            if their_token == token and node in missing:
                found[node] = link
            else:
                link.close()
    return [found[node] for node in sorted(found)]


def _connect(node: int, host: str, port: int, token: bytes, deadline: float) -> socket.socket:
    while True:
        try:
            link = socket.create_connection((host, port), timeout=_left(deadline, f"node 0 does not answer at {host}:{port}"))
            link.sendall(_HELLO.pack(token, node))
            return link
        except OSError:
            time.sleep(0.05)


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StarError(f"{what}; see the other nodes' logs, or give more time with --rendezvous-timeout")
    return left
