"""The scheduler over a scripted runner: every request is answered, with the text it would have alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.blackbox import BatchKind, BlackBox, Header
from engine.cache.memory import KVMemory
from engine.cache.pages import PagePool
from engine.cache.prefix import PrefixCache
from engine.flags import parse
from engine.messages import Abort, Generate, Grammar, Outputs, Refused, Sampling, Tokens
from engine.scheduler.batching import Queues
from engine.scheduler.batchlog import BatchLog
from engine.scheduler.loops import OverlapLoop, SequentialLoop
from engine.scheduler.plan import Plan, Row
from engine.scheduler.results import Results, RowResult
from engine.scheduler.scheduler import Scheduler
from tests.engine.scripted_runner import STOP, ScriptedRunner, next_token, text_alone

LOOPS = pytest.mark.parametrize("loop", [OverlapLoop, SequentialLoop])


@dataclass
class Compiled:
    key: str
    ok: bool
    error: str = ""
    busy: bool = False


class ManualGrammars:
    """A grammar backend whose compiles end when the test says so."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.done: list[Compiled] = []

    def submit(self, key: str, grammar: Grammar) -> None:
        self.submitted.append(key)

    def forget(self, key: str) -> None:
        self.submitted.remove(key)

    def poll(self) -> list[Compiled]:
        done, self.done = self.done, []
        return done


@dataclass
class Bench:
    scheduler: Scheduler
    runner: ScriptedRunner
    loop: Any
    lines: list[str]
    box: BlackBox
    inbox: list[Generate | Abort] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)

    def take(self, outputs: Outputs) -> None:
        for item in outputs.items:
            if isinstance(item, Refused):
                self.refused[item.rid] = item
            else:
                self._take_tokens(item)

    def _take_tokens(self, item: Tokens) -> None:
        assert item.rid not in self.ended, "a message came after the last"
        self.answers.setdefault(item.rid, []).extend(item.ids)
        if item.finish:
            self.ended[item.rid] = item.finish

    def receive(self) -> None:
        for message in self.inbox:
            if isinstance(message, Generate):
                self.scheduler.add(message)
            else:
                self.scheduler.abort(message)
        self.inbox.clear()
        self.scheduler.poll_grammars()

    def drain(self, turns: int = 20_000) -> None:
        for _ in range(turns):
            if not self.loop.turn():
                break
        else:
            raise AssertionError("the loop never came to rest")
        self.scheduler.flush()
        self.scheduler.idle()
        assert self.scheduler.memory.pool.pending == 0


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(loop: type = OverlapLoop, *, pages: int = 64, args: tuple[str, ...] = (), drafts: Any = None, grammar: Any = None,
             on_launch: Callable[[Plan], None] | None = None) -> Bench:  # fmt: skip
        settings = parse(["--page-size", "4", "--chunked-prefill-size", "8", *args])
        runner = ScriptedRunner(4, drafts, on_launch)
        lines: list[str] = []
        box = BlackBox(tmp_path / "rank-0.box", Header(pid=1, rank=0, world=1, config_digest="d"))
        holder: list[Bench] = []
        scheduler = Scheduler(settings, runner, box, pages=pages, context=200, send=lambda out: holder[0].take(out),  # type: ignore[arg-type]
                              grammar=grammar, log=lines.append)  # fmt: skip
        made = Bench(scheduler, runner, None, lines, box)
        made.loop = loop(scheduler, made.receive)
        holder.append(made)
        return made

    return make


def ask(rid: str, prompt: list[int], room: int = 12, **more: Any) -> Generate:
    return Generate(rid=rid, input_ids=prompt, sampling=Sampling(seed=1, max_tokens=room, temperature=0.0), **more)


def prompt_of(rng: random.Random, most: int = 30) -> list[int]:
    """Few distinct tokens, so that prefixes are shared."""
    return [rng.randrange(1, 4) for _ in range(rng.randrange(1, most))]


def good_and_bad_drafts(tokens: list[int], most: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(most):
        drafts.append(next_token(tokens + drafts))
    if most and len(tokens) % 3 == 0:
        drafts[len(tokens) % most] = 49
    return drafts


@LOOPS
def test_a_request_gets_the_text_it_would_have_alone(bench: Callable[..., Bench], loop: type) -> None:
    b = bench(loop)
    b.inbox.append(ask("a", [3, 1, 2]))
    b.drain()
    assert b.answers["a"] == text_alone([3, 1, 2], 12)
    assert b.ended["a"] in ("stop", "length")


@LOOPS
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("speculation", [False, True])
def test_whatever_shares_the_pool_every_text_is_the_same_and_no_page_is_lost(
    bench: Callable[..., Bench], loop: type, seed: int, speculation: bool
) -> None:
    rng = random.Random(seed)
    args = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "3") if speculation else ()
    b = bench(
        loop, pages=rng.choice([14, 20, 64]), args=(*args, "--max-running-requests", str(rng.choice([2, 6]))), drafts=good_and_bad_drafts
    )
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(30):
        rid, prompt, room = f"r{number}", prompt_of(rng), rng.randrange(1, 15)
        b.inbox.append(ask(rid, prompt, room))
        wanted[rid] = text_alone(prompt, room)
        for _ in range(rng.randrange(4)):
            b.loop.turn()
        if rng.random() < 0.3:
            victim = f"r{rng.randrange(number + 1)}"
            b.inbox.append(Abort(victim))
            aborted.add(victim)
    b.drain()
    assert not b.refused
    for rid, text in wanted.items():
        if rid in aborted:
            assert b.answers.get(rid, []) == text[: len(b.answers.get(rid, []))]
        else:
            assert b.answers[rid] == text, rid
    assert b.scheduler.queues.held == 0
    assert not b.runner.known, "a rank still keeps a request that has ended"


@LOOPS
def test_a_full_pool_retracts_and_drops_nothing(bench: Callable[..., Bench], loop: type) -> None:
    b = bench(loop, pages=12)
    prompts = {f"r{n}": [1 + n % 3, 2, 3, 1, 2, n + 1] for n in range(6)}
    for rid, prompt in prompts.items():
        b.inbox.append(ask(rid, prompt, 20, ))  # fmt: skip
    b.drain()
    assert b.box.counters["retractions"] > 0
    assert b.answers == {rid: text_alone(prompt, 20) for rid, prompt in prompts.items()}


def test_pages_of_an_aborted_request_stay_out_of_reach_while_its_step_is_on_its_way(bench: Callable[..., Bench]) -> None:
    def no_overlap(plan: Plan) -> None:
        flight = at_plan.pop() if at_plan else None
        for row in plan.rows if flight else ():
            others = {page for rid, pages in flight.items() if rid != row.rid for page in pages if rid in gone}
            assert not others & set(row.pages or ()), "a page was handed out while a launched step may still write it"

    at_plan: list[dict[str, list[int]]] = []
    gone: set[str] = set()
    b = bench(OverlapLoop, pages=8, on_launch=no_overlap)
    plan = b.scheduler.plan

    def watched(*, settled: bool) -> Plan | None:
        if b.runner.in_flight is not None:
            at_plan[:] = [b.runner.in_flight.pages]
        return plan(settled=settled)

    b.scheduler.plan = watched  # type: ignore[method-assign]
    b.inbox.append(ask("a", list(range(1, 23)), 2))
    b.loop.turn()
    gone.add("a")
    b.inbox += [Abort("a"), ask("b", [40, 41, 42, 43, 44, 45, 46, 47], 2)]
    b.loop.turn()
    b.drain()
    assert b.answers["b"] == text_alone([40, 41, 42, 43, 44, 45, 46, 47], 2)


@LOOPS
def test_an_abort_is_silent_and_final(bench: Callable[..., Bench], loop: type) -> None:
    b = bench(loop)
    b.inbox.append(ask("a", [3, 1, 2], 100))
    for _ in range(4):
        b.loop.turn()
    b.inbox.append(Abort("a"))
    b.inbox.append(Abort("nobody"))
    b.drain()
    assert "a" not in b.ended
    assert b.box.counters["requests_aborted"] == 1


@LOOPS
def test_long_prompts_are_prefilled_in_chunks_that_take_turns_with_decoding(bench: Callable[..., Bench], loop: type) -> None:
    b = bench(loop)
    b.inbox.append(ask("short", [1, 2], 30, ))  # fmt: skip
    b.loop.turn()
    b.loop.turn()
    b.inbox.append(ask("long", [2] * 60, 2))
    b.drain()
    kinds = [plan.kind for plan in b.runner.plans if any(row.rid == "long" and row.count for row in plan.rows)]
    assert len(kinds) == 8
    steps = [plan.step for plan in b.runner.plans if any(row.rid == "long" and row.count for row in plan.rows)]
    decodes = [plan.step for plan in b.runner.plans if any(row.rid == "short" and not row.count for row in plan.rows)]
    assert any(steps[0] < step < steps[-1] for step in decodes) or len(text_alone([1, 2], 30)) < 4


@LOOPS
def test_a_common_prefix_is_computed_once(bench: Callable[..., Bench], loop: type) -> None:
    b = bench(loop)
    shared = [5, 6, 7, 8] * 4
    b.inbox.append(ask("a", [*shared, 9], 2))
    b.drain()
    b.inbox.append(ask("b", [*shared, 10], 2))
    b.drain()
    first = next(row for plan in b.runner.plans for row in plan.rows if row.rid == "b")
    assert (first.start, first.count) == (16, 1)
    assert b.box.counters["cached_tokens"] == 16


def test_what_cannot_fit_is_refused_with_the_numbers(bench: Callable[..., Bench]) -> None:
    b = bench(pages=8)
    b.inbox += [ask("long", [1] * 31), ask("empty", []), ask("a", [1, 2], 50), ask("a", [1, 2], 50)]
    b.drain()
    assert "31 tokens; this server takes 1 to 30" in b.refused["long"].message
    assert b.refused["empty"].status == 400
    assert "in use" in b.refused["a"].message
    assert b.answers["a"] == text_alone([1, 2], 29)


def test_requests_wait_for_their_grammar_and_are_refused_when_it_fails(bench: Callable[..., Bench]) -> None:
    grammars = ManualGrammars()
    b = bench(grammar=grammars)
    b.inbox += [ask("good", [1, 2], grammar=Grammar("regex", "a")), ask("bad", [1, 2], grammar=Grammar("regex", "(")), ask("free", [2, 1])]
    b.drain()
    assert set(b.ended) == {"free"}
    assert b.scheduler.queues.held == 2
    good, bad = grammars.submitted
    grammars.done += [Compiled(good, True), Compiled(bad, False, "regex: missing )")]
    b.drain()
    assert b.answers["good"] == text_alone([1, 2], 12)
    assert (b.refused["bad"].status, b.refused["bad"].message) == (400, "regex: missing )")
    b.inbox.append(ask("late", [1, 2], grammar=Grammar("regex", "b")))
    b.drain()
    grammars.done.append(Compiled(grammars.submitted[-1], False, "no grammar can be compiled now", busy=True))
    b.drain()
    assert (b.refused["late"].status, b.refused["late"].retry_after_s) == (503, 5)


def test_an_abort_while_the_grammar_compiles_is_final(bench: Callable[..., Bench]) -> None:
    grammars = ManualGrammars()
    b = bench(grammar=grammars)
    b.inbox += [ask("a", [1, 2], grammar=Grammar("regex", "a"))]
    b.drain()
    b.inbox.append(Abort("a"))
    grammars.done.append(Compiled(grammars.submitted[0], True))
    b.drain()
    assert not grammars.submitted, "the backend still keeps the grammar of a request that has gone"
    assert not b.answers
    assert b.scheduler.queues.held == 0


def test_a_probe_goes_to_the_head_of_the_queue(bench: Callable[..., Bench]) -> None:
    b = bench(SequentialLoop, args=("--max-running-requests", "1"))
    b.inbox += [ask("a", [1, 2], 3), ask("b", [2, 2], 3), ask("probe", [3, 3], 1, probe=True)]
    b.drain()
    assert list(b.ended) == ["probe", "a", "b"]


def test_both_loops_plan_the_same_steps(bench: Callable[..., Bench]) -> None:
    texts = []
    for loop in (OverlapLoop, SequentialLoop):
        b = bench(loop, pages=16, args=("--speculative-algorithm", "NGRAM"), drafts=good_and_bad_drafts)
        b.inbox += [ask(f"r{n}", [n + 1, 2, 3] * 3, 12) for n in range(5)]
        b.drain()
        texts.append(b.answers)
    assert texts[0] == texts[1]


def test_the_next_step_is_prepared_before_the_last_one_is_collected(bench: Callable[..., Bench]) -> None:
    order: list[str] = []
    b = bench(OverlapLoop, on_launch=lambda plan: order.append(f"launch {plan.step}"))
    plan, collect = b.scheduler.plan, b.scheduler.collect

    def watched_plan(*, settled: bool) -> Plan | None:
        made = plan(settled=settled)
        if made:
            order.append(f"plan {made.step}")
        return made

    def watched_collect(launched: Any) -> Any:
        order.append(f"collect {launched.plan.step}")
        return collect(launched)

    b.scheduler.plan, b.scheduler.collect = watched_plan, watched_collect  # type: ignore[method-assign, assignment]
    b.inbox.append(ask("a", [1, 2], 4))
    b.drain()
    assert order[:6] == ["plan 1", "launch 1", "plan 2", "collect 1", "launch 2", "plan 3"]


def test_batch_lines_are_sglangs(bench: Callable[..., Bench]) -> None:
    b = bench(SequentialLoop, args=("--decode-log-interval", "2"))
    b.inbox.append(ask("a", [7, 7, 7], 9))
    b.drain()
    assert b.lines[0].startswith(
        "Prefill batch, #new-seq: 1, #new-token: 3, #cached-token: 0, token usage: 0.02, #running-req: 1, #queue-req: 0,"
    )
    decode = next(line for line in b.lines if line.startswith("Decode batch, #running-req: 1, #token: "))
    assert ", gen throughput (token/s): " in decode
    assert decode.endswith("#queue-req: 0")


def test_a_rest_does_not_count_in_the_throughput_of_the_next_line() -> None:
    now = [0]
    lines: list[str] = []
    log = BatchLog(lines.append, lambda: now[0], interval=4)
    queues, memory = Queues(), KVMemory(PagePool(8, 4), PrefixCache(4))
    row = RowResult("a", (1,), "", None, 1)

    def steps(kind: BatchKind, count: int) -> None:
        for _ in range(count):
            now[0] += 100_000_000
            rows = [Row("a", 0, 10 if kind is BatchKind.prefill else 0, True, 0, None)]
            log.step(Plan(step=1, kind=kind, rows=rows), Results(1, (row,), 1, 1), queues, memory)

    steps(BatchKind.decode, 3)
    now[0] += 60_000_000_000
    steps(BatchKind.prefill, 1)
    steps(BatchKind.decode, 4)
    assert "gen throughput (token/s): 10.00" in lines[-1], lines


def test_a_stop_id_ends_the_text_and_is_named(bench: Callable[..., Bench]) -> None:
    prompt = next([a, b_] for a in range(1, 50) for b_ in range(1, 50) if text_alone([a, b_], 40)[-1] == STOP)
    b = bench()
    b.inbox.append(ask("a", prompt, 40))
    b.drain()
    assert b.ended["a"] == "stop"
    assert b.answers["a"][-1] == STOP
