"""How the ranks of a deployment find each other: torch.distributed's store and process group.

With ``--dist-init-addr HOST:PORT`` the store listens there (rank 0). Without it, on one node, the system picks a port
and the host's ranks learn it together with their shared memory.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import socket
import struct
import time
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.config import Settings, run_directory

GROUP_TIMEOUT = datetime.timedelta(days=365)
"""A stuck collective is for the watchdog, which captures it first; torch's own clock must never end it."""
_SIOCGIFADDR = 0x8915


class RendezvousError(RuntimeError):
    """The ranks did not come together in time; the text says which are missing."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int  # 0: for the system to choose


def address(settings: Settings) -> Address:
    """Where the store listens. Raises RendezvousError for an address that is not HOST:PORT."""
    given = settings.parallel.dist_init_addr
    if not given:
        return Address("127.0.0.1", 0)
    host, _, port = given.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65533:
        raise RendezvousError(f"--dist-init-addr: {given!r} is not HOST:PORT with a port below 65533 (the next three are used too)")
    return Address(host.strip("[]"), int(port))


def gathering_name(settings: Settings, node: int) -> str:
    """A name that the ranks of one node of one deployment share. Ranks that are given no address must be children of
    one launcher: its pid tells two deployments with the same run directory apart."""
    given = settings.parallel.dist_init_addr
    identity = f"{given} node {node}" if given else f"{run_directory(settings)} parent {os.getppid()}"
    return "lastbatch-" + hashlib.sha256(f"{os.getuid()} {identity}".encode()).hexdigest()[:32]


def serve_store(where: Address, world: int, deadline: float) -> TCPStore:
    """Rank 0's store; its ``port`` is where it listens."""
    try:
        return TCPStore(where.host, where.port, world, is_master=True, timeout=_left(deadline, "no time is left"), wait_for_workers=False)
    except dist.DistError as error:
        raise RendezvousError(f"--dist-init-addr: cannot listen on {where.host}:{where.port}: {_first_line(error)}") from error


def join_store(where: Address, world: int, deadline: float) -> TCPStore:
    left = _left(deadline, f"rank 0 does not answer at {where.host}:{where.port}")
    try:
        return TCPStore(where.host, where.port, world, is_master=False, timeout=left, wait_for_workers=False)
    except dist.DistError as error:
        raise RendezvousError(
            f"rank 0 does not answer at {where.host}:{where.port} within {left.total_seconds():.0f} s: {_first_line(error)}; "
            "see its log, or give more time with --rendezvous-timeout"
        ) from error


def join_group(store: Store, backend: str, rank: int, world: int, deadline: float, rendezvous_host: str) -> None:
    """Make torch's process group once all ranks have come, so that its own long time-out is never waited for.

    Raises:
        RendezvousError: some ranks did not come, or this one is too late: rank 0 still belongs to an earlier start of the
            group, which cannot take a rank again that it has lost.
    """
    try:
        late = store.check([f"come/{rank}"])
    except dist.DistError as error:
        raise RendezvousError(f"the store of rank 0 is gone: {_first_line(error)}") from error
    if late:
        raise RendezvousError(f"rank {rank} has come to this group before: rank 0 is of an earlier start, which has to end first")
    meet(store, "come", rank, world, deadline)
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_towards(rendezvous_host))
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=GROUP_TIMEOUT)


def meet(store: Store, name: str, rank: int, world: int, deadline: float) -> None:
    """Wait until all ranks have called this with the same name. Signals are served meanwhile.

    Raises:
        RendezvousError: the deadline (``time.monotonic()``) passed, or the store is gone.
    """
    try:
        store.set(f"{name}/{rank}", "1")
        missing = [r for r in range(world) if r != rank]
        while missing := [r for r in missing if not store.check([f"{name}/{r}"])]:
            if time.monotonic() > deadline:
                raise RendezvousError(f"ranks {missing} did not reach {name!r} in time; see their logs")
            time.sleep(0.005)
    except dist.DistError as error:
        raise RendezvousError(f"{name!r}: the store of rank 0 is gone: {_first_line(error)}") from error


def _left(deadline: float, what: str) -> datetime.timedelta:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RendezvousError(f"{what}; see the other ranks' logs, or give more time with --rendezvous-timeout")
    return datetime.timedelta(seconds=left)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _interface_towards(host: str) -> str:
    """The network interface from which packets to ``host`` leave (its own, where ``host`` is this machine)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "lo"
        mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == mine:
                return name
    return "lo"
