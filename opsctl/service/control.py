"""How opsctl talks to an embedded supervisor: one JSON line each way over a unix socket in the service's run folder."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from opsctl.service.manager import LeaseLost, Locked, ServiceError, Unreachable
from opsctl.service.record import LeaseRecord, OverrideRecord, ServiceRecord

_LONGEST = 4 << 20


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``do``: snapshot, start, stop, end, arm, renew, disarm, lease, trial, prepare, commit, restore or revert."""

    do: str
    token: str = ""
    ttl_s: float = 0.0
    lease: LeaseRecord | None = None
    override: OverrideRecord | None = None


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``error``: empty, or which exception ``message`` belongs to."""

    error: str = ""
    message: str = ""
    record: ServiceRecord | None = None
    token: str = ""


class NoSupervisor(ServiceError):
    """There is no supervisor (any more)."""


_ERRORS: dict[str, type[ServiceError]] = {"service": ServiceError, "locked": Locked, "lease": LeaseLost}


def error_name(error: ServiceError) -> str:
    return next((name for name, kind in _ERRORS.items() if type(error) is kind), "service")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for a socket that fits its 108 bytes, however deep the folder lies."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    with _short(path) as name:
        listener.bind(name)
    path.chmod(0o600)
    listener.listen(16)
    return listener


def serve_one(listener: socket.socket, answer: Callable[[Request], Reply]) -> None:
    """Take one call and answer it. A caller that is slow or gone costs a second and nothing else."""
    try:
        caller, _ = listener.accept()
    except BlockingIOError:
        return
    with caller:
        caller.settimeout(1.0)
        try:
            request = msgspec.json.decode(_line(caller), type=Request)
        except (OSError, msgspec.MsgspecError) as error:
            reply = Reply(error="service", message=f"not a request: {error}")
        else:
            reply = answer(request)
        with contextlib.suppress(OSError):  # the caller has gone and will ask again
            caller.sendall(msgspec.json.encode(reply) + b"\n")


def call(path: Path, request: Request, deadline_s: float = 5.0) -> Reply:
    """Ask the supervisor.

    Raises:
        NoSupervisor: nobody listens, or it died over the question.
        Unreachable: it did not answer in time.
        ServiceError, Locked, LeaseLost: what it answered.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(deadline_s)
        try:
            with _short(path) as name:
                connection.connect(name)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            reply = msgspec.json.decode(_line(connection), type=Reply)
        except (FileNotFoundError, ConnectionError) as error:
            raise NoSupervisor(f"{path}: {error}") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreachable(f"{path}: the supervisor did not answer `{request.do}` within {deadline_s:g} s: {error}") from error
    if reply.error:
        raise _ERRORS.get(reply.error, ServiceError)(reply.message)
    return reply


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError("closed before the end of the line")
        data += part
        if len(data) > _LONGEST:
            raise ConnectionAbortedError(f"a line of more than {_LONGEST} bytes")
    return data
