"""A rank's process: load, meet the other ranks, warm up, serve. Started by the launcher, never by hand.

The main thread blocks only in ZMQ polls and in ``Event.synchronize``, never in a collective, so signals always reach
it. The launcher stops a rank over a pipe (``LASTBATCH_CONTROL_FD``): SIGTERM and SIGINT go to the whole process
group or control group at once and must not take ranks down before the drain, so a rank ignores them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle
import torch
import zmq

from engine.blackbox import BlackBox, Header, Phase
from engine.config import ConfigError, Settings
from engine.exec.device import Device, open_device
from engine.exec.executor import Executor
from engine.exec.kv import KVPool
from engine.exec.pool_size import pool_pages
from engine.faults import Faults
from engine.grammar.trial import Compiler, Trials
from engine.messages import RankInfo, Ready
from engine.model.hf_config import ModelConfigError, read_config
from engine.model.registry import Model, load_model
from engine.native.build import paths as native_paths
from engine.parallel.group import Group, open_group
from engine.parallel.secret import GroupSecret
from engine.scheduler.loops import OverlapLoop, SequentialLoop
from engine.scheduler.place import Place
from engine.scheduler.plan import Begin, Hello
from engine.scheduler.rank_link import RankHub, RankSpoke, address
from engine.scheduler.service import GroupRunner, Service
from engine.scheduler.worker import follow
from engine.speculation.drafters import Drafter, NgramDrafter, NullDrafter
from engine.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from engine.grammar.backends import GrammarBackend

_log = logging.getLogger("engine.rank")


class RankProcess:
    def __init__(self, place: Place, trials: Trials | None) -> None:
        self._place = place
        self._trials = trials
        settings = place.settings
        self._settings = settings
        self._box = BlackBox(
            place.run_dir / f"rank-{place.rank}.box",
            Header(pid=os.getpid(), rank=place.rank, world=settings.parallel.tp, config_digest=settings.digest, tp=place.rank,
                   invocation_id=place.invocation, node=settings.parallel.node_rank, role=settings.launch.role, name=settings.launch.name),
            settings.declared_json(),
        )  # fmt: skip
        self._faults = Faults(place.rank, settings.launch.fault) if settings.launch.enable_faults else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def run(self) -> None:
        self._box.enter(Phase.load)
        place, settings = self._place, self._settings
        device = open_device(place.device_kind, place.settings.local_ranks.index(place.rank))
        where = address(settings, place.sockets, bind=place.rank == 0)
        self._secret = GroupSecret.of(settings)
        hub = RankHub(self._context, where, range(1, settings.parallel.tp), self._secret) if place.rank == 0 else None
        group = open_group(settings, place.rank, self._box, device.torch_device)
        device.stream.while_waiting = group.poll
        if self._faults is not None:
            faults = self._faults
            group.intercept = lambda _kind, tensor: faults.collective(tensor)
        begun = time.monotonic()
        _log.info("Loading %s on %s", place.model.name, device.torch_device)
        model = load_model(place.model, dtype=_dtype(settings, place.model), group=group, device=device.torch_device)
        _log.info("Loaded %s in %.1f s", place.model.name, time.monotonic() - begun)
        info = RankInfo(place.rank, 0, 0, place.rank, 0, settings.parallel.node_rank, os.getpid(), settings.digest)
        page_bytes = _page_bytes(settings, model, _dtype(settings, place.model))
        hello = Hello(info, _pages(settings, model, page_bytes, device), _paths(model, group))
        if hub is None:
            self._follow(where, hello, model, group, device)
        else:
            self._lead(hub, hello, model, group, device)
        device.stream.close()
        group.close()
        self._box.close(unlink=True)

    def _executor(self, model: Model, group: Group, device: Device, pages: int, grammar: GrammarBackend | None) -> Executor:
        settings, config = self._settings, model.config
        dtype = _dtype(settings, self._place.model)
        size = pages * _page_bytes(settings, model, dtype)
        _log.info("KV pool: %d tokens in %d pages, %.2f GB%s", pages * settings.cache.page_size, pages, size / 1e9,
                  "" if device.torch_device.type == "cuda" else ", taken from the system as it fills")  # fmt: skip
        kv = KVPool(config.layers, pages, settings.cache.page_size, len(model.shard.kv_heads), config.head_dim,
                    dtype, device.torch_device)  # fmt: skip
        loop = OverlapLoop.name if settings.overlaps(self._place.device_kind) else SequentialLoop.name
        return Executor(model=model, kv=kv, group=group, device=device, box=self._box, eos_ids=config.eos_ids,
                        new_drafter=_drafters(settings), grammar=grammar, grammar_step_s=settings.grammar.step_budget_ms / 1000, loop=loop,
                        faults=self._faults)  # fmt: skip

    def _follow(self, where: str, hello: Hello, model: Model, group: Group, device: Device) -> None:
        link = RankSpoke(self._context, where, self._place.rank, self._secret)
        link.hello(hello)
        begin = link.receive(self._settings.parallel.rendezvous_timeout_s)
        if not isinstance(begin, Begin):
            raise RuntimeError(f"rank 0 did not answer in {self._settings.parallel.rendezvous_timeout_s:g} s (--rendezvous-timeout)")
        follow(link, self._executor(model, group, device, begin.pages, None), self._box, self._faults, self._place.stopped)
        link.close()

    def _lead(self, hub: RankHub, hello: Hello, model: Model, group: Group, device: Device) -> None:
        settings, config = self._settings, model.config
        others = hub.gather(settings.parallel.rendezvous_timeout_s)
        pages = min(one.pages for one in (hello, *others))
        hub.send(Begin(pages))
        grammar = None
        if settings.grammar.backend != "none":
            _log.info("Loading the grammar backend %s", settings.grammar.backend)
            from engine.grammar.backends import open_backend  # with xgrammar, which a server without grammars does not load

            grammar = open_backend(settings.grammar.backend, tokenizer_folder=self._place.model, vocab_size=config.vocab,
                                   eos_ids=config.eos_ids, compile_timeout_s=settings.grammar.compile_timeout_s,
                                   max_whitespace=settings.grammar.max_whitespace, trials=self._trials)  # fmt: skip
        runner = GroupRunner(hub, self._executor(model, group, device, pages, grammar))
        context = settings.model.context_length or config.context
        dtype = _dtype(settings, self._place.model)
        if pages * settings.cache.page_size < context:
            _log.warning("The KV pool holds %d tokens, less than the context's %d: no request may be longer (--max-total-tokens)",
                         pages * settings.cache.page_size, context)  # fmt: skip
        service = Service(self._place, self._context, self._box, runner, hub, grammar, self._faults, pages=pages, context_length=context)
        tokenizer = Tokenizer.load(self._place.model)
        if self._faults is not None:
            self._faults.encode = tokenizer.encode
        service.warm_up(tokenizer.encode("The quick brown fox jumps over the lazy dog."))
        service.open(Ready(context_length=context, vocab_size=config.vocab, eos_ids=list(config.eos_ids),
                           pool_tokens=pages * settings.cache.page_size, ranks=[hello.info, *(one.info for one in others)],
                           paths={**hello.paths, "loop": service.loop_name}),
                     {"device": device.torch_device.type, "dtype": str(dtype).removeprefix("torch."), "context": context,
                      "pool_tokens": pages * settings.cache.page_size,
                      "pool_bytes": pages * _page_bytes(settings, model, dtype)})  # fmt: skip
        service.serve()
        hub.stop()
        if grammar is not None:
            grammar.close()
        hub.close()


def _dtype(settings: Settings, folder: Path) -> torch.dtype:
    name = settings.model.dtype
    if name == "auto":
        name = read_config(folder).torch_dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _page_bytes(settings: Settings, model: Model, dtype: torch.dtype) -> int:
    config = model.config
    return KVPool.bytes_per_page(config.layers, settings.cache.page_size, len(model.shard.kv_heads), config.head_dim, dtype)


def _pages(settings: Settings, model: Model, page_bytes: int, device: Device) -> int:
    """KV pages that this rank has memory for, or that the settings ask for."""
    left: int | None = None
    machine: int | None = None
    if device.torch_device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch_device)
        left = int(free - total * (1 - (settings.cache.mem_fraction or 0.85)))
    else:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(settings.local_ranks)
        left = int(machine * settings.cache.mem_fraction) if settings.cache.mem_fraction else None
    useful = settings.scheduler.max_running_requests * (settings.model.context_length or model.config.context)
    return pool_pages(settings.cache, useful_tokens=useful, page_bytes=page_bytes, left_bytes=left, machine_bytes=machine)


def _paths(model: Model, group: Group) -> dict[str, str]:
    return {**native_paths(), **model.paths(), **group.paths()}


def _trials(place: Place) -> Trials | None:
    """Where doubtful grammars are tried. To be called before this process has threads or a device."""
    settings = place.settings
    if place.rank or settings.grammar.backend == "none":
        return None
    config = read_config(place.model)

    def make() -> Compiler:
        from engine.grammar.xgrammar_compiler import XgrammarCompiler

        return XgrammarCompiler(
            place.model, vocab_size=config.vocab, eos_ids=config.eos_ids, max_whitespace=settings.grammar.max_whitespace
        )

    return Trials.start(make)


def _drafters(settings: Settings) -> Callable[[], Drafter]:
    if settings.speculation.algorithm == "NGRAM":
        return lambda: NgramDrafter(settings.speculation.ngram_min, settings.speculation.ngram_max)
    return NullDrafter


def _start_log(settings: Settings, rank: int) -> None:
    tag = f" TP{rank}" if settings.parallel.tp > 1 else ""
    logging.basicConfig(stream=sys.stderr, level=settings.server.log_level.upper(), format=f"[%(asctime)s{tag}] %(message)s",
                        datefmt="%Y-%m-%d %H:%M:%S")  # fmt: skip


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no rank outlives its launcher
    place = Place.from_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(f"lastbatch::scheduler_TP{place.rank} cfg={place.settings.digest[:12]}")
    _start_log(place.settings, place.rank)
    trials = _trials(place)
    if place.device_kind == "cpu":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        RankProcess(place, trials).run()
    except (ConfigError, ModelConfigError, TokenizerError) as error:
        _log.error("%s", error)
        return 2
    except Exception:
        _log.exception("Scheduler hit an exception")
        return 1
    return 0


if __name__ == "__main__":
    # os._exit: a stuck stream thread or a half-closed group must not hold up a process that has nothing left to say.
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
