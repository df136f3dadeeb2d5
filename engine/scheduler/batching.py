"""The prefill and decode policy: which rows the next step has.

Prefill and decode steps take turns while both have work, so that a long prompt does not silence those who decode.
Memory for a row is taken here, before the row exists. When the pool is full, requests are *retracted*, youngest
first: they give their pages back and go to the head of the queue with the tokens they have; nothing is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.blackbox import BatchKind
from engine.cache.memory import KVMemory
from engine.scheduler.plan import Row
from engine.scheduler.request import Request, Stage


class Deferred(Exception):
    """The pool is too full to plan ahead of the results that are on their way: settle them first."""


@dataclass
class Queues:
    """Every request that rank 0 holds is in exactly one of these."""

    compiling: dict[str, Request] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    prefill: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    @property
    def held(self) -> int:
        return len(self.compiling) + len(self.waiting) + len(self.prefill) + len(self.running)

    def remove(self, request: Request) -> None:
        if request.stage is Stage.compiling:
            self.compiling.pop(request.rid, None)
        elif request.stage is Stage.waiting:
            self.waiting.remove(request)
        elif request.stage is Stage.prefill:
            self.prefill.remove(request)
        else:
            self.running.remove(request)


class Batching:
    """Picks rows. ``retract`` is called for each request that must give way."""

    def __init__(self, memory: KVMemory, queues: Queues, *, max_running: int, chunk: int, drafts: int,
                 retract: Callable[[Request], None]) -> None:  # fmt: skip
        self._memory = memory
        self._queues = queues
        self._max_running = max_running
        self._chunk = chunk
        self._drafts = drafts
        self._retract = retract
        self._prefilled_last = False

    def next_rows(self, *, settled: bool) -> tuple[BatchKind, list[Row]]:
        """The rows of the next step; none when there is nothing to do.

        Raises:
            Deferred: only when not ``settled`` (a step is still on its way).
        """
        if not (self._prefilled_last and self._queues.running):
            rows = self._prefill_rows()
            if rows:
                self._prefilled_last = True
                return BatchKind.prefill, rows
        self._prefilled_last = False
        kind = BatchKind.verify if self._drafts else BatchKind.decode
        rows = self._decode_rows(settled)
        if not rows and settled:
            rows = self._prefill_rows() or self._make_way()
            if rows:
                kind = BatchKind.prefill
        return kind, rows

    def _prefill_rows(self) -> list[Row]:
        budget = self._chunk if self._chunk > 0 else 1 << 60
        rows: list[Row] = []
        for request in list(self._queues.prefill):
            if budget <= 0:
                return rows
            count = min(budget, len(request.tokens) - request.planned)
            if not self._memory.grow(request.kv, request.planned + count):
                return rows
            rows.append(self._prefill_row(request, count))
            budget -= count
        while budget > 0 and self._queues.waiting and len(self._queues.prefill) + len(self._queues.running) < self._max_running:
            request = self._queues.waiting[0]
            request.kv = self._memory.attach(request.tokens, reuse=request.message.prompt_logprobs < 0)
            count = min(budget, len(request.tokens) - request.kv.kv_len)
            if not (self._has_room(request) and self._memory.grow(request.kv, request.kv.kv_len + count)):
                self._memory.release(request.kv, request.tokens, 0, keep=False)
                return rows
            self._queues.waiting.popleft()
            if not request.output_length:
                request.cached_tokens = request.kv.kv_len
            request.stage = Stage.prefill
            self._queues.prefill.append(request)
            rows.append(self._prefill_row(request, count))
            budget -= count
        return rows

    def _has_room(self, request: Request) -> bool:
        """Whether to let a request in: its whole prompt must fit, with a page to spare for each that decodes,
        or it would only push others out again."""
        busy = len(self._queues.running) + len(self._queues.prefill)
        promised = sum(self._memory.pool.pages_for(len(other.tokens)) - len(other.kv.pages) for other in self._queues.prefill)
        need = self._memory.pool.pages_for(len(request.tokens) + 1) - len(request.kv.pages)
        return need + max(promised, 0) + busy <= self._memory.available

    def _prefill_row(self, request: Request, count: int) -> Row:
        start = request.planned
        draws = start + count == len(request.tokens)
        if draws:
            self._queues.prefill.remove(request)
            self._queues.running.append(request)
            request.stage = Stage.running
        return self._row(request, start, count, draws, 0)

    def _decode_rows(self, settled: bool) -> list[Row]:
        rows: list[Row] = []
        running = self._queues.running
        at = 0
        while at < len(running):
            request = running[at]
            if self._memory.grow(request.kv, request.planned + 1 + self._drafts):
                at += 1
                continue
            if not settled:
                raise Deferred
            self._retract((self._queues.prefill or running)[-1])
        for request in running:
            rows.append(self._row(request, 0, 0, True, self._drafts))
        return rows

    def _make_way(self) -> list[Row]:
        """Nothing decodes and no prefill could grow: requests in prefill hold each other's memory."""
        while len(self._queues.prefill) > 1:
            self._retract(self._queues.prefill[-1])
            rows = self._prefill_rows()
            if rows:
                return rows
        return []

    def _row(self, request: Request, start: int, count: int, draws: bool, drafts: int) -> Row:
        row = Row(request.rid, start, count, draws, drafts, list(request.kv.pages) if request.kv.changed else None)
        request.kv.changed = False
        request.kv.ahead += row.most
        return row
