"""The evidence that a capture would find, made from what is really going on. Frames are the engines' own names."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.blackbox import COUNTERS, DeviceRecord, DeviceState, Header, Host, Phase, PhaseStat, Snapshot
from monitors.engines import Dialect
from monitors.judge.scene import Clock, Frame, Gpu, Health, Process, Scene, Stack, Thread

WEDGES = ("grammar_barrier", "symmetric_spin", "asymmetric", "tp_desync", "host_callback", "control_plane", "cpu_bound", "stopped",
          "unknown")  # fmt: skip

_SRT, _V1 = "sglang/srt/managers/scheduler.py", "vllm/v1/executor/multiproc_executor.py"
_QUEUE = "vllm/distributed/device_communicators/shm_broadcast.py"
_LOOP = {
    "sglang": (("event_loop_overlap", _SRT, 1200), ("run_scheduler_process", _SRT, 2900)),
    "vllm": (("worker_busy_loop", _V1, 700), ("worker_main", _V1, 600)),
    "lastbatch": (("turn", "engine/scheduler/loops.py", 50), ("serve", "engine/scheduler/service.py", 130)),
    "generic": (("loop", "server/engine.py", 10),),
}
_RECEIVE = {
    "sglang": (("recv_requests", _SRT, 900),),
    "vllm": (("acquire_read", _QUEUE, 500), ("dequeue", _QUEUE, 600)),
    "lastbatch": (("wait_for_work", "engine/scheduler/worker.py", 22),),
    "generic": (("recv", "zmq/sugar/socket.py", 90),),
}
_GRAMMAR = {
    "sglang": (("synchronize", "torch/cuda/streams.py", 231), ("advance_grammar_fsm", "sglang/srt/managers/scheduler.py", 1500)),
    "vllm": (("synchronize", "torch/cuda/streams.py", 231), ("grammar_bitmask", "vllm/v1/structured_output/__init__.py", 200)),
    "lastbatch": (("synchronize", "engine/exec/device.py", 60), ("grammar_barrier", "engine/exec/executor.py", 150)),
    "generic": (("synchronize", "torch/cuda/streams.py", 231), ("grammar_barrier", "server/engine.py", 44)),
}  # fmt: skip
_DEVICE = (("synchronize", "torch/cuda/streams.py", 231), ("forward_batch_generation", "srt/managers/tp_worker.py", 240))
_COLLECTIVE = (("all_reduce", "torch/distributed/distributed_c10d.py", 2810), ("all_reduce", "distributed/parallel_state.py", 480))
_COMPILE = (("make_llir", "triton/backends/nvidia/compiler.py", 320), ("compile", "triton/compiler/compiler.py", 280))
_CALLBACK = (("read", "os.py", 1), ("stream_callback", "server/storage.py", 30))


@dataclass(frozen=True)
class Server:
    """A simulated server: what it is and which signals it gives."""

    dialect: Dialect
    ranks: int
    gpus: bool  # its GPUs are read
    stacks: bool  # py-spy works on it


def scene(server: Server, truth: str, held: float, quiet_s: float, rng: random.Random) -> Scene:
    """The scene of a stall. ``truth`` is a wedge of ``WEDGES``, or what a healthy server is about."""
    name = server.dialect.name if server.dialect.name in _LOOP else "generic"
    odd = rng.randrange(server.ranks) if server.ranks > 1 else 0
    where = [_frames(truth, rank == odd, name, server.ranks) for rank in range(server.ranks)]
    stacks: list[Stack] = []
    if server.stacks and truth != "unknown":
        for sample in ("", "t3"):
            for rank, (main, moves) in enumerate(where):
                shift = rng.randrange(1, 90) if moves and sample else 0
                frames = tuple(Frame(function, file, line + shift) for function, file, line in (*main, *_LOOP[name]))
                stacks.append(
                    Stack(str(rank), _title(name, rank), 100 + rank, (Thread("MainThread", 100 + rank, True, False, frames),), sample)
                )
    gpus = tuple(_gpu(truth, rank == odd, rank, server.ranks) for rank in range(server.ranks)) if server.gpus else ()
    states = ["T" if truth == "stopped" and rank == odd else "S" for rank in range(server.ranks)]
    processes = tuple(Process(100 + rank, 1, state, _title(name, rank), rank=rank) for rank, state in enumerate(states))
    boxes = {rank: _box(truth, rank == odd, rank, server.ranks, int(held)) for rank in range(server.ranks)} if name == "lastbatch" else {}
    clocks = {rank: Clock(int((1000 + quiet_s) * 1e9)) for rank in boxes}
    metrics = {server.dialect.metrics.running[0]: held} if server.dialect.metrics.running and not boxes else {}
    return Scene(server.dialect, boxes=boxes, clocks=clocks, stacks=tuple(stacks), gpus=gpus, processes=processes if server.stacks else (),
                 metrics=metrics, health=(Health("/health", 200, 0.01),), stalled_s=quiet_s)  # fmt: skip


def _title(name: str, rank: int) -> str:
    return {"sglang": f"sglang::scheduler_TP{rank}", "vllm": f"VLLM::Worker_TP{rank}", "lastbatch": f"lastbatch::scheduler_TP{rank}"}.get(
        name, "server"
    )


def _frames(truth: str, odd: bool, name: str, ranks: int) -> tuple[tuple[tuple[str, str, int], ...], bool]:
    """The innermost frames of a rank's main thread, and whether they move from sample to sample."""
    if truth == "grammar_barrier":
        return _GRAMMAR[name], False
    if truth in ("symmetric_spin", "prefill", "recovering"):
        return _DEVICE, False
    if truth in ("jit", "asymmetric") and (odd or ranks == 1):
        return (_COMPILE, True) if truth == "jit" else ((("read", "io.py", 12), ("load_pages", "server/storage.py", 77)), False)
    if truth in ("jit", "asymmetric", "stopped"):
        return _COLLECTIVE, False
    if truth == "tp_desync":
        return (_RECEIVE[name], False) if odd else (_COLLECTIVE, False)
    if truth == "host_callback":
        return (_CALLBACK, False) if odd else (_DEVICE, False)
    if truth == "cpu_bound":
        return (
            ((("_dispatch", "server/policy.py", 60), ("get_next_batch_to_run", "managers/scheduler.py", 1700)), True)
            if odd
            else (_RECEIVE[name], False)
        )
    return _RECEIVE[name], False


def _gpu(truth: str, odd: bool, rank: int, ranks: int) -> Gpu:
    idle, spins, works = (0.0, 0.0, 70.0), (100.0, 1.0, 190.0), (100.0, 55.0, 640.0)
    seen = {
        "grammar_barrier": spins, "symmetric_spin": spins, "unknown": spins, "prefill": works, "recovering": works, "control_plane": idle,
        "cpu_bound": idle, "lag": idle,
    }.get(truth, idle if odd else spins)  # fmt: skip
    return Gpu("a", rank, *seen, 700.0, "nvml")


def _box(truth: str, odd: bool, rank: int, ranks: int, held: int) -> Snapshot:
    collective = (Phase.wait_device, DeviceState.collective, 500, 499)
    phase, device, enqueued, completed = {
        "grammar_barrier": collective, "symmetric_spin": collective,
        "asymmetric": (Phase.wait_device, DeviceState.compute, 500, 500) if odd else collective,
        "host_callback": (Phase.wait_device, DeviceState.compute, 500, 500) if odd else collective,
        "tp_desync": (Phase.recv, DeviceState.idle, 499, 499) if odd else collective,
        "control_plane": (Phase.idle if rank == 0 else Phase.recv, DeviceState.idle, 499, 499),
        "cpu_bound": (Phase.schedule if odd else Phase.recv, DeviceState.idle, 499, 499),
        "unknown": collective, "stopped": (Phase.launch, DeviceState.idle, 499, 499) if odd else collective,
    }.get(truth, (Phase.launch, DeviceState.compute, 499, 499))  # fmt: skip
    counters = dict.fromkeys(COUNTERS, 0)
    host = Host(90, 10**12, 10**12, 5, phase, held, 0, held if rank == 0 else 0, counters, {one: PhaseStat(0, 0, 0) for one in Phase})
    record = DeviceRecord(90, 10**12, enqueued, completed, 4096, 1, 90, 89, device, 1)
    return Snapshot(Header(100 + rank, rank, ranks, "d", "ab" * 16, tp=rank), "{}", host, record, ())
