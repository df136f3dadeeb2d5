"""What the nodes of a group know and a stranger who reaches their ports does not: ``--group-token-file``.

The links that ZMQ carries (rank 0's plans, the nodes' black boxes) run under CurveZMQ with a server key that is made from
the token: without it no handshake comes to an end, so nothing of a stranger's is ever read. The store in which ranks meet
is torch's own and knows no passwords; there the keys that ranks use bear a name that is made from the token, and so
does what lets a node into the TCP star. Without a token these ports must be closed to strangers by the network.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import zmq
from zmq.utils import z85

from engine.config import ConfigError, Settings

LEAST = 16
"""Characters of a token."""


class GroupSecret:
    """``None`` in its place means that there is no token."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._server_secret = z85.encode(self.derived("curve server"))
        self._server_public = zmq.curve_public(self._server_secret)

    @staticmethod
    def of(settings: Settings) -> GroupSecret | None:
        """From the file that the settings name; None when they name none, or when there is one node.

        Raises:
            ConfigError: it cannot be read, or is too short to be a secret.
        """
        path = settings.parallel.group_token_file
        if not path or settings.parallel.nnodes == 1:
            return None
        try:
            token = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--group-token-file: {path}: {error.strerror}") from error
        if len(token) < LEAST:
            raise ConfigError(f"--group-token-file: {path}: {len(token)} characters; make one with: openssl rand -hex 32")
        return GroupSecret(token)

    def derived(self, purpose: str) -> bytes:
        """32 bytes that only the group can know, others for each purpose."""
        return hmac.digest(self._token, f"lastbatch group: {purpose}".encode(), hashlib.sha256)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound: only members of the group get through."""
        socket.curve_server = True
        socket.curve_secretkey = self._server_secret
        socket.curve_publickey = self._server_public

    def enter(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is connected: as a member, to a guarded one."""
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = self._server_public
