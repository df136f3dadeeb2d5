"""The batch log lines, in SGLang's current form, so that one parser and people's dashboards serve both engines."""

from __future__ import annotations

from collections.abc import Callable

from engine.blackbox import BatchKind
from engine.cache.memory import KVMemory
from engine.scheduler.batching import Queues
from engine.scheduler.plan import Plan
from engine.scheduler.results import Results

_LONGEST_SILENCE_NS = 2_000_000_000


class BatchLog:
    """A prefill line for each prefill step (after its result), a decode line every ``interval`` decode steps or
    2 s, whichever is first."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], int], *, interval: int) -> None:
        self._write = write
        self._clock = clock
        self._interval = interval
        self._prefill_ns = self._since_ns = self._last_ns = clock()
        self._steps = self._tokens = self._rows = self._drafted = self._accepted = 0

    def step(self, plan: Plan, results: Results, queues: Queues, memory: KVMemory) -> None:
        if not plan.rows:
            return
        if plan.kind == BatchKind.prefill:
            self._prefill(plan, queues, memory)
        else:
            self._decode(results, queues, memory)

    def _prefill(self, plan: Plan, queues: Queues, memory: KVMemory) -> None:
        now = self._clock()
        tokens = sum(row.count for row in plan.rows)
        cached = sum(row.start for row in plan.rows if any(enter.rid == row.rid for enter in plan.enters))
        pending = sum(len(r.tokens) - r.planned for r in queues.prefill) + sum(len(r.tokens) for r in queues.waiting)
        rate = tokens / max((now - max(self._prefill_ns, self._last_ns)) / 1e9, 1e-6)
        self._write(
            f"Prefill batch, #new-seq: {len(plan.rows)}, #new-token: {tokens}, #cached-token: {cached}, "
            f"token usage: {_usage(memory):.2f}, #running-req: {len(queues.running)}, #queue-req: {_queued(queues)}, "
            f"#pending-token: {pending}, cpu graph: False, input throughput (token/s): {rate:.2f}"
        )
        self._prefill_ns = now

    def _decode(self, results: Results, queues: Queues, memory: KVMemory) -> None:
        now = self._clock()
        if now - self._last_ns > _LONGEST_SILENCE_NS:  # after a rest: what was counted before it is no rate of now
            self._restart(max(self._prefill_ns, self._last_ns))
        self._last_ns = now
        self._steps += 1
        for row in results.rows:
            self._rows += 1
            self._tokens += len(row.tokens)
            self._drafted += row.drafted
            self._accepted += len(row.tokens) - 1
        elapsed = now - self._since_ns
        if self._steps < self._interval and elapsed < _LONGEST_SILENCE_NS:
            return
        accept = ""
        if self._drafted:
            accept = f"accept len: {self._tokens / max(self._rows, 1):.2f}, accept rate: {self._accepted / self._drafted:.2f}, "
        held = sum(request.kv.kv_len for request in (*queues.running, *queues.prefill))
        self._write(
            f"Decode batch, #running-req: {len(queues.running)}, #token: {held}, token usage: {_usage(memory):.2f}, "
            f"{accept}cpu graph: False, gen throughput (token/s): {self._tokens / max(elapsed / 1e9, 1e-6):.2f}, "
            f"#queue-req: {_queued(queues)}"
        )
        self._restart(now)

    def _restart(self, now: int) -> None:
        self._since_ns = now
        self._steps = self._tokens = self._rows = self._drafted = self._accepted = 0


def _usage(memory: KVMemory) -> float:
    """Share of the pool that requests hold (what the prefix cache could give up does not count)."""
    return 1 - memory.available / memory.pool.total


def _queued(queues: Queues) -> int:
    return len(queues.waiting) + len(queues.compiling)
