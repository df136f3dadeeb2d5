"""Rank 0's scheduler: takes requests in, plans steps, and turns results into answers.

It holds no tensor. The model is behind the ``Runner`` protocol, so a scripted runner can force any accepted length,
any finish and any abort.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.blackbox import BlackBox, EventKind, Phase, request_hash
from engine.cache.memory import KVMemory
from engine.cache.pages import PagePool
from engine.cache.prefix import PrefixCache
from engine.config import Settings
from engine.faults import Faults
from engine.grammar.backends import GrammarBackend, grammar_key
from engine.messages import Abort, Generate, Outputs, Refused, Tokens
from engine.scheduler.batching import Batching, Deferred, Queues
from engine.scheduler.batchlog import BatchLog
from engine.scheduler.plan import Enter, Plan
from engine.scheduler.request import Request, Stage
from engine.scheduler.results import Launched, Results, RowResult, Runner

_RETRY_AFTER_S = 5


class Scheduler:
    """One deployment's requests from arrival to answer.

    Args:
        runner: carries out plans.
        pages: KV pages in the pool.
        context: longest prompt and answer together, in tokens.
        send: takes what goes to the API process.
        grammar: compiles grammars; None when there is no backend (the API process refuses them first).
        faults: armed for a drill; None without ``--enable-faults``.
        clock: monotonic nanoseconds.
    """

    def __init__(self, settings: Settings, runner: Runner, box: BlackBox, *, pages: int, context: int, grammar: GrammarBackend | None,
                 send: Callable[[Outputs], None], log: Callable[[str], None], faults: Faults | None = None,
                 clock: Callable[[], int] = time.monotonic_ns) -> None:  # fmt: skip
        self._settings = settings
        self._runner = runner
        self._box = box
        self._send = send
        self._grammar = grammar
        self._faults = faults
        self._drafts = settings.speculation.num_draft_tokens if settings.speculation.algorithm != "NONE" else 0
        self.memory = KVMemory(PagePool(pages, settings.cache.page_size),
                               PrefixCache(settings.cache.page_size, enabled=not settings.cache.disable_radix_cache))  # fmt: skip
        self.queues = Queues()
        self._batching = Batching(self.memory, self.queues, max_running=settings.scheduler.max_running_requests,
                                  chunk=settings.scheduler.chunked_prefill_size, drafts=self._drafts, retract=self._retract)  # fmt: skip
        self._requests: dict[str, Request] = {}
        self._outputs: list[Tokens | Refused] = []
        self._leaves: list[str] = []
        self._step = 0
        self._launched_step = 0
        self._log = BatchLog(log, clock, interval=settings.scheduler.decode_log_interval)
        self._most = min(context, self.pool_tokens - 1 - self._drafts)
        box.counters["pages_total"] = pages

    @property
    def pool_tokens(self) -> int:
        return self.memory.pool.total * self.memory.pool.page_size

    @property
    def longest_prompt(self) -> int:
        return self._most - 1

    # Requests in.

    def add(self, message: Generate) -> None:
        """Take a request, or refuse it with the reason."""
        self._box.counters["requests_received"] += 1
        length, most = len(message.input_ids), self._most
        if message.rid in self._requests:
            self._refuse(message.rid, 400, f"request id {message.rid} is in use")
            return
        if not 1 <= length < most:
            self._refuse(message.rid, 400, f"the prompt has {length} tokens; this server takes 1 to {most - 1}")
            return
        request = Request(message, room=max(1, min(message.sampling.max_tokens, most - length)))
        self._requests[message.rid] = request
        if message.grammar is None:
            self._enqueue(request)
        elif self._grammar is None:
            self._drop(request)
            self._refuse(message.rid, 400, "this server has no grammar backend")
        else:
            request.stage = Stage.compiling
            request.grammar = grammar_key(message.grammar)
            self.queues.compiling[message.rid] = request
            self._grammar.submit(request.grammar, message.grammar)

    def abort(self, message: Abort) -> None:
        """Forget a request wherever it is. Pages that a launched step may touch come back when that step is done."""
        request = self._requests.get(message.rid)
        if request is None:
            return
        self._box.event(EventKind.abort, a=request_hash(request.rid))
        self._box.counters["requests_aborted"] += 1
        self.queues.remove(request)
        self.memory.release(request.kv, request.tokens, self._launched_step, keep=False)
        self._drop(request)

    def abort_all(self, reason: str) -> None:
        for request in list(self._requests.values()):
            self._outputs.append(Tokens(rid=request.rid, ids=[], finish="abort", error=reason))
            self.abort(Abort(request.rid))

    def poll_grammars(self) -> None:
        """Move requests whose grammar has compiled into the queue; refuse those whose grammar has failed."""
        if self._grammar is None or not self.queues.compiling:
            return
        for done in self._grammar.poll():
            for request in [r for r in self.queues.compiling.values() if r.grammar == done.key]:
                del self.queues.compiling[request.rid]
                if done.ok:
                    self._box.counters["grammar_compiles"] += 1  # of requests, cached or not
                    self._enqueue(request)
                else:
                    self._box.counters["grammar_failures"] += 1
                    self._drop(request)
                    self._refuse(request.rid, 503 if done.busy else 400, done.error)

    def _enqueue(self, request: Request) -> None:
        request.stage = Stage.waiting
        if request.message.probe:
            self.queues.waiting.appendleft(request)
        else:
            self.queues.waiting.append(request)

    # Steps out.

    def plan(self, *, settled: bool) -> Plan | None:
        """The next step, or None: nothing to do, or (not ``settled``) not before the last results are in."""
        if not self.queues.held and not self._leaves:
            return None
        if self._faults is not None and self.queues.held:
            if self._faults.withheld():
                return None
            while settled and self._faults.again():
                self.idle()
        self._box.event(EventKind.prepare_begin, a=self._step + 1)
        try:
            kind, rows = self._batching.next_rows(settled=settled)
        except Deferred:
            return None
        if not rows and not self._leaves:
            return None
        enters = []
        for row in rows:
            request = self._requests[row.rid]
            if not request.entered:
                request.entered = True
                enters.append(self._enter(request))
                if not request.output_length:
                    self._box.counters["prompt_tokens"] += request.prompt_length
                    self._box.counters["cached_tokens"] += request.cached_tokens
        leaves, self._leaves = self._leaves, []
        self._step += 1
        self._box.event(EventKind.prepare_end, a=self._step)
        return Plan(step=self._step, kind=kind, rows=rows, enters=enters, leaves=leaves)

    def launch(self, plan: Plan) -> Launched:
        self._launched_step = plan.step
        return self._runner.launch(plan)

    def collect(self, launched: Launched) -> Results:
        return self._runner.collect(launched)

    def process(self, launched: Launched, results: Results) -> None:
        """Turn a collected step into answers, freed pages, counters and log lines."""
        self._box.enter(Phase.results)
        self.memory.complete(results.step)
        by_rid = {row.rid: row for row in launched.plan.rows}
        for result in results.rows:
            request = self._requests.get(result.rid)
            if request is None:
                continue  # aborted while the step was on its way
            request.kv.ahead -= by_rid[result.rid].most
            request.kv.kv_len = result.kv_len
            request.tokens += result.tokens
            self._count(result.drafted, len(result.tokens))
            if result.tokens or result.finish:
                self._outputs.append(self._answer(request, result))
            if result.finish:
                self.queues.remove(request)
                self.memory.release(request.kv, request.tokens, self._launched_step, keep=True)
                self._drop(request)
                self._box.counters["requests_finished"] += 1
                if self._faults is not None:
                    self._faults.answered()
            elif by_rid[result.rid].count and by_rid[result.rid].draws:
                self.memory.publish(request.kv, request.tokens, self._launched_step)
        self._log.step(launched.plan, results, self.queues, self.memory)
        self._totals(launched.plan, results)
        self.flush()

    def idle(self) -> None:
        """Nothing is held and nothing is on its way: the books must balance."""
        self.memory.check(request.kv for request in self._requests.values())

    def flush(self) -> None:
        """Hand what there is to the API process."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send(Outputs(outputs))

    def publish_state(self) -> None:
        """Write queue lengths and counters to the black box."""
        counters, pool = self._box.counters, self.memory.pool
        if self._faults is not None:
            pool = self._faults.books(pool)
        counters["running"] = len(self.queues.running) + len(self.queues.prefill)
        counters["waiting"] = len(self.queues.waiting)
        counters["grammar_waiting"] = len(self.queues.compiling)
        counters["pages_free"], counters["pages_pending"], counters["pages_cached"] = pool.free, pool.pending, self.memory.prefix.size
        self._box.publish()
        self._box.beat(running=counters["running"], waiting=counters["waiting"] + counters["grammar_waiting"], held=self.queues.held)

    def forget_prefixes(self) -> None:
        self.memory.forget_prefixes()

    def _enter(self, request: Request) -> Enter:
        message = request.message
        return Enter(rid=request.rid, tokens=list(request.tokens), prompt_length=request.prompt_length, sampling=message.sampling,
                     room=request.room, grammar=request.grammar, logprobs=message.logprobs,
                     prompt_logprobs=-1 if request.prompt_logprobs_sent else message.prompt_logprobs,
                     warmup=message.rid.startswith("warmup-"))  # fmt: skip

    def _answer(self, request: Request, result: RowResult) -> Tokens:
        scores = None
        if result.prompt_logprobs and not request.prompt_logprobs_sent:
            request.prompt_logprobs_sent = True
            scores = list(result.prompt_logprobs)
        return Tokens(rid=request.rid, ids=list(result.tokens), finish=result.finish, matched=result.matched, error=result.error,
                      blamed=result.blamed, cached_tokens=request.cached_tokens, logprobs=list(result.logprobs),
                      prompt_logprobs=scores)  # fmt: skip

    def _refuse(self, rid: str, status: int, message: str) -> None:
        self._box.counters["requests_rejected"] += 1
        busy = status == 503
        kind = "service_unavailable" if busy else "invalid_request_error"
        self._outputs.append(Refused(rid, status, message, kind, retry_after_s=_RETRY_AFTER_S if busy else 0))

    def _drop(self, request: Request) -> None:
        del self._requests[request.rid]
        if request.entered:
            self._leaves.append(request.rid)
        if request.grammar and self._grammar is not None:
            self._grammar.forget(request.grammar)

    def _retract(self, request: Request) -> None:
        self._box.event(EventKind.retract, a=request_hash(request.rid), b=request.kv.kv_len)
        self._box.counters["retractions"] += 1
        self.queues.remove(request)
        self.memory.release(request.kv, request.tokens, self._launched_step, keep=True)
        if request.entered:
            self._leaves.append(request.rid)
            request.entered = False
        request.stage = Stage.waiting
        self.queues.waiting.appendleft(request)

    def _count(self, drafted: int, accepted: int) -> None:
        self._box.counters["generated_tokens"] += accepted
        self._box.counters["drafted_tokens"] += drafted
        if drafted:
            self._box.counters["accepted_tokens"] += accepted - 1

    def _totals(self, plan: Plan, results: Results) -> None:
        counters = self._box.counters
        counters["executed_tokens"] += results.executed
        counters["useful_tokens"] += results.useful
        counters[("batches_prefill", "batches_decode", "batches_verify")[plan.kind - 1]] += bool(plan.rows)
