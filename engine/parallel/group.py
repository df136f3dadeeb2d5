"""The ranks that share a model, and the collectives among them.

On a CPU the collectives are ours: shared memory inside a host (``local.py``), TCP between hosts (``star.py``), with
the hosts' first ranks speaking for their host. On CUDA they are NCCL's. In both, a rank that enters another collective
than its peers, or none, parks them all for ever.

Each collective is written to the black box before it is entered and when it completes. On CUDA it completes on the
device; ``poll`` then finds out.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from engine.blackbox import BlackBox, CollectiveKind
from engine.config import Settings
from engine.native import collectives
from engine.parallel import rendezvous
from engine.parallel.block import BlockError, open_block
from engine.parallel.futex import FutexLocal
from engine.parallel.local import AloneLocal, Local, NativeLocal
from engine.parallel.secret import GroupSecret
from engine.parallel.star import Star, StarError

Intercept = Callable[[CollectiveKind, torch.Tensor], torch.Tensor | None]
_DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4, torch.int32: 5, torch.uint8: 6}
_GOODBYE_S = 5.0


class GroupError(RuntimeError):
    """The group could not be made, or lost a node."""


class Group:
    """One rank's membership. Collectives are for the stream thread; ``barrier`` and ``close`` for the main thread.

    ``intercept`` is called before each collective with its kind and tensor: it may return the tensor (enter as
    planned), another one (enter with that instead) or None (do not enter: nothing is recorded, and the result is
    whatever the tensor held). It is how faults are made.
    """

    def __init__(self, rank: int = 0, world: int = 1, box: BlackBox | None = None) -> None:
        self.rank = rank
        self.world = world
        self.intercept: Intercept | None = None
        self._box = box
        self._sequence = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum ``x`` (contiguous) over the ranks, in place; the same bits on every rank."""
        if self.world == 1:
            return
        entered = self._intercepted(CollectiveKind.all_reduce, x)
        if entered is not None:
            with self._recorded(CollectiveKind.all_reduce, entered):
                self._all_reduce(entered, _signature(CollectiveKind.all_reduce, entered))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, all of one shape, joined along ``dim`` in the order of ranks."""
        if self.world == 1:
            return x
        entered = self._intercepted(CollectiveKind.all_gather, x)
        if entered is None:
            return torch.cat([x] * self.world, dim)
        out = entered.new_empty((self.world, *entered.shape))
        with self._recorded(CollectiveKind.all_gather, entered):
            self._all_gather(entered, out, _signature(CollectiveKind.all_gather, entered))
        return torch.cat(out.unbind(0), dim)

    def barrier(self, timeout_s: float) -> None:
        """Wait on the host until every rank has called this as often. Raises GroupError when the time is up."""

    def poll(self) -> None:
        """Record the collectives that have completed on a device meanwhile. On a CPU there is nothing to find."""

    def close(self) -> None:
        """Leave the group, after a short wait for the others."""

    def paths(self) -> dict[str, str]:
        return {"collectives": "none: one rank"}

    def _intercepted(self, kind: CollectiveKind, x: torch.Tensor) -> torch.Tensor | None:
        entered = x if self.intercept is None else self.intercept(kind, x)
        if entered is not None and not entered.is_contiguous():
            raise ValueError(f"{kind.name}: a tensor {list(entered.shape)} with strides {entered.stride()} is not contiguous")
        return entered

    @contextlib.contextmanager
    def _recorded(self, kind: CollectiveKind, x: torch.Tensor) -> Iterator[None]:
        self._sequence += 1
        if self._box is not None:
            self._box.collective_enqueued(kind, self._sequence, x.nbytes)
        yield
        if self._box is not None:
            self._completed(kind, self._sequence, x.nbytes)

    def _completed(self, kind: CollectiveKind, sequence: int, nbytes: int) -> None:
        if self._box is not None:
            self._box.collective_completed(kind, sequence, nbytes)

    def _all_reduce(self, x: torch.Tensor, signature: int) -> None:
        raise NotImplementedError

    def _all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        raise NotImplementedError


class _TorchGroup(Group):
    """What the CPU's and CUDA's groups share: torch's store and process group."""

    def __init__(self, store: Store, rank: int, world: int, box: BlackBox | None) -> None:
        super().__init__(rank, world, box)
        self._store = store
        self._barriers = 0

    def barrier(self, timeout_s: float) -> None:
        self._barriers += 1
        try:
            rendezvous.meet(self._store, f"barrier {self._barriers}", self.rank, self.world, time.monotonic() + timeout_s)
        except rendezvous.RendezvousError as error:
            raise GroupError(f"rank {self.rank}: barrier: {error}") from error

    def close(self) -> None:
        """The store lives in rank 0, which goes last."""
        with contextlib.suppress(rendezvous.RendezvousError):  # who is already gone need not say goodbye
            rendezvous.meet(self._store, "goodbye", self.rank, self.world if self.rank == 0 else 1, time.monotonic() + _GOODBYE_S)
        dist.destroy_process_group()


class HostGroup(_TorchGroup):
    """Ranks on CPUs. ``counts`` are the ranks of each node; ranks of a node are consecutive."""

    def __init__(self, store: Store, rank: int, box: BlackBox | None, counts: tuple[int, ...], local: Local, star: Star | None) -> None:
        super().__init__(store, rank, sum(counts), box)
        self._counts = counts
        self._node, first = 0, 0
        while rank >= first + counts[self._node]:
            first += counts[self._node]
            self._node += 1
        self._local = local
        self._star = star
        self._leads = rank == first

    def _all_reduce(self, x: torch.Tensor, signature: int) -> None:
        if x.dtype not in (torch.float32, torch.bfloat16):
            wide = x.float()
            self._all_reduce(wide, signature)
            x.copy_(wide)
            return
        self._local.all_reduce(x, signature)
        if len(self._counts) > 1:
            if self._star is not None:
                self._star.all_reduce(x, self._sequence, signature)
            self._local.broadcast(x, signature)

    def _all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        if len(self._counts) == 1:
            self._local.all_gather(x, out, signature)
            return
        mine = x.new_empty((self._counts[self._node], *x.shape))
        self._local.all_gather(x, mine, signature)
        if self._star is not None:
            self._star.all_gather(mine, out, self._counts, self._sequence, signature)
        self._local.broadcast(out, signature)

    def close(self) -> None:
        super().close()
        if self._star is not None:
            self._star.close()

    def paths(self) -> dict[str, str]:
        return {"collectives": self._local.name + (f"; TCP between {len(self._counts)} nodes" if len(self._counts) > 1 else "")}


class CudaGroup(_TorchGroup):
    """Ranks on GPUs: NCCL, on the stream that is current where a collective is called."""

    def __init__(self, store: Store, rank: int, world: int, box: BlackBox | None) -> None:
        super().__init__(store, rank, world, box)
        self._pending: collections.deque[tuple[Any, CollectiveKind, int, int]] = collections.deque()

    def _all_reduce(self, x: torch.Tensor, signature: int) -> None:
        dist.all_reduce(x)

    def _all_gather(self, x: torch.Tensor, out: torch.Tensor, signature: int) -> None:
        dist.all_gather_into_tensor(out, x)

    def _completed(self, kind: CollectiveKind, sequence: int, nbytes: int) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((event, kind, sequence, nbytes))
        self.poll()

    def poll(self) -> None:
        while self._pending and self._pending[0][0].query():
            _, kind, sequence, nbytes = self._pending.popleft()
            super()._completed(kind, sequence, nbytes)

    def paths(self) -> dict[str, str]:
        return {"collectives": "nccl " + ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]


def open_group(settings: Settings, rank: int, box: BlackBox | None, device: torch.device) -> Group:
    """Join the deployment's other ranks.

    Returns within ``--rendezvous-timeout``. Without ``--dist-init-addr`` (one node) the ranks must be children of one
    process.

    Raises:
        GroupError: not all ranks came, or an address cannot be used; the text says which and why.
    """
    world = settings.parallel.tp
    if world == 1:
        return Group(0, 1, box)
    deadline = time.monotonic() + settings.parallel.rendezvous_timeout_s
    try:
        return _join(settings, rank, box, device, world, deadline)
    except (BlockError, StarError, rendezvous.RendezvousError, dist.DistError) as error:
        raise GroupError(f"rank {rank} of {world}: {error}") from error


def _join(settings: Settings, rank: int, box: BlackBox | None, device: torch.device, world: int, deadline: float) -> Group:
    nodes = settings.parallel.nnodes
    node = settings.node_of(rank)
    counts = tuple(sum(settings.node_of(r) == n for r in range(world)) for n in range(nodes))
    local_rank = rank - sum(counts[:node])
    where = rendezvous.address(settings)
    store = rendezvous.serve_store(where, world, deadline) if rank == 0 else None
    block = None
    if counts[node] > 1:
        name = rendezvous.gathering_name(settings, node)
        block, port = open_block(name, local_rank, counts[node], deadline, note=store.port if store is not None else where.port)
        where = rendezvous.Address(where.host, where.port or port)
    shared: Store = store if store is not None else rendezvous.join_store(where, world, deadline)
    secret = GroupSecret.of(settings)
    if secret is not None:
        shared = PrefixStore(secret.derived("store").hex(), shared)
    rendezvous.join_group(shared, "gloo" if device.type == "cpu" else "nccl", rank, world, deadline, where.host)
    if device.type != "cpu":
        return CudaGroup(shared, rank, world, box)
    local: Local = AloneLocal()
    if block is not None:
        library = collectives.load()
        local = NativeLocal(library, block, local_rank, counts[node]) if library else FutexLocal(block, local_rank, counts[node])
    star = None
    if nodes > 1 and local_rank == 0:
        if rank == 0:
            shared.set("token", os.urandom(16).hex())
        token = bytes.fromhex(shared.get("token").decode())
        star = Star.open(node, nodes, where.host, where.port + 1, token, deadline)
    rendezvous.meet(shared, "joined", rank, world, deadline)
    return HostGroup(shared, rank, box, counts, local, star)


def _signature(kind: CollectiveKind, x: torch.Tensor) -> int:
    return kind << 56 | _DTYPE_CODES.get(x.dtype, 0) << 48 | x.nbytes
