"""The loop of every rank but the first: carry out plans, one at a time, in the order they come."""

from __future__ import annotations

from collections.abc import Callable

from engine.blackbox import BlackBox, Phase
from engine.exec.executor import Executor
from engine.faults import Faults
from engine.scheduler.plan import Arm, Disarm, Open, Plan, Stop
from engine.scheduler.rank_link import RankSpoke

_BEAT_S = 0.2


def follow(link: RankSpoke, executor: Executor, box: BlackBox, faults: Faults | None, stopped: Callable[[], bool]) -> None:
    """Return when rank 0 says stop or the launcher does."""
    counters = box.counters
    while not stopped():
        box.enter(Phase.recv)
        message = link.receive(_BEAT_S)
        if message is None:
            box.beat()
            box.publish()
        elif isinstance(message, Plan):
            results = executor.collect(executor.launch(message))
            counters["executed_tokens"] += results.executed
            counters["useful_tokens"] += results.useful
            counters["running"] = executor.held
            if message.rows:
                counters[("batches_prefill", "batches_decode", "batches_verify")[message.kind - 1]] += 1
            box.beat(held=executor.held, running=executor.held)
            box.publish()
        elif isinstance(message, Open):
            reset_counters(box)
            if faults is not None:
                faults.ready = True
        elif isinstance(message, Arm) and faults is not None:
            faults.arm(message.spec)
        elif isinstance(message, Disarm) and faults is not None:
            faults.disarm(message.name)
        elif isinstance(message, Stop):
            return


def reset_counters(box: BlackBox) -> None:
    """The warm-up's work is not the users': totals begin at 0 when the server is ready."""
    for name in box.counters:
        if not name.startswith("pages_"):
            box.counters[name] = 0
    box.publish()
