"""The executor on a real small model: texts do not depend on drafts, batches or loops, and the FSM moves once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.blackbox import BlackBox, EventKind, Header, read, request_hash
from engine.config import Settings
from engine.exec.device import open_device
from engine.exec.executor import Executor
from engine.exec.kv import KVPool
from engine.flags import parse
from engine.grammar.backends import open_backend
from engine.messages import Generate, Grammar, Outputs, Refused, Sampling
from engine.model.registry import load_model
from engine.parallel.group import Group
from engine.scheduler.loops import OverlapLoop, SequentialLoop
from engine.scheduler.scheduler import Scheduler
from engine.speculation.drafters import NgramDrafter, NullDrafter
from engine.text.tokenizer import Tokenizer
from tests.tiny_models import EOS_ID, tiny_model

PATTERN = "(ab|cd){3,12}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


class Engine:
    """Scheduler, executor and model in one process, on a real stream thread."""

    def __init__(self, model: Path, folder: Path, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.box_path = folder / "rank-0.box"
        self.box = BlackBox(self.box_path, Header(pid=1, rank=0, world=1, config_digest=settings.digest))
        self.device = open_device("cpu", 0)
        loaded = load_model(model, dtype=torch.float32, group=Group(), device=self.device.torch_device)
        config = loaded.config
        kv = KVPool(config.layers, 256, settings.cache.page_size, len(loaded.shard.kv_heads), config.head_dim, torch.float32)
        self.grammar = open_backend("xgrammar", tokenizer_folder=model, vocab_size=config.vocab, eos_ids=config.eos_ids,
                                    compile_timeout_s=20, max_whitespace=2)  # fmt: skip
        drafts = settings.speculation.algorithm == "NGRAM"
        self.executor = Executor(model=loaded, kv=kv, group=Group(), device=self.device, box=self.box, eos_ids=config.eos_ids,
                                 new_drafter=(lambda: NgramDrafter(1, 3)) if drafts else NullDrafter, grammar=self.grammar,
                                 loop="overlap", faults=None)  # fmt: skip
        self.scheduler = Scheduler(settings, self.executor, self.box, pages=256, context=512, grammar=self.grammar, send=self._take,
                                   log=lambda _line: None)  # fmt: skip
        self.inbox: list[Generate] = []
        kind = OverlapLoop if settings.overlaps("cpu") else SequentialLoop
        self.loop = kind(self.scheduler, self._receive)
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}

    def _receive(self) -> None:
        for message in self.inbox:
            self.scheduler.add(message)
        self.inbox.clear()
        self.scheduler.poll_grammars()

    def _take(self, outputs: Outputs) -> None:
        for item in outputs.items:
            assert not isinstance(item, Refused), item
            self.ids.setdefault(item.rid, []).extend(item.ids)
            if item.finish:
                self.ends[item.rid] = item.finish

    def answer(self, *requests: Generate) -> dict[str, list[int]]:
        self.inbox += requests
        wanted = {request.rid for request in requests}
        for _ in range(200_000):
            self.loop.turn()
            if wanted <= self.ends.keys():
                break
        while self.loop.turn():
            pass
        assert wanted <= self.ends.keys(), "not every request was answered"
        return {rid: self.ids[rid] for rid in wanted}

    def close(self) -> None:
        self.grammar.close()
        self.device.stream.close()
        self.box.close()


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*args: str) -> Engine:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Engine(model, folder, parse(["--page-size", "8", *args])))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def ask(rid: str, ids: list[int], room: int = 40, *, regex: str = "", **sampling: Any) -> Generate:
    return Generate(rid=rid, input_ids=ids, grammar=Grammar("regex", regex) if regex else None,
                    sampling=Sampling(seed=5, max_tokens=room, **{"temperature": 0.0, "ignore_eos": not regex, **sampling}))  # fmt: skip


OVERLAP = ("--enable-overlap-schedule",)
DRAFTING = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.5}])
def test_drafts_change_when_tokens_come_and_never_which(
    engine: Callable[..., Engine], tokenizer: Tokenizer, sampling: dict[str, Any]
) -> None:
    ids = tokenizer.encode("la la la la la la la la")
    plain = engine().answer(ask("a", ids, **sampling))
    drafted = engine(*DRAFTING)
    assert drafted.answer(ask("a", ids, **sampling)) == plain
    assert sampling or drafted.box.counters["drafted_tokens"] > 0


@pytest.mark.parametrize("args", [OVERLAP, (*OVERLAP, *DRAFTING), (), DRAFTING])
def test_constrained_text_matches_its_grammar_beside_free_requests(
    engine: Callable[..., Engine], tokenizer: Tokenizer, args: tuple[str, ...]
) -> None:
    one = engine(*args)
    ids = tokenizer.encode("abcdabcd: ")
    alone = engine().answer(ask("c", ids, regex=PATTERN))["c"]
    found = one.answer(
        ask("free", tokenizer.encode("abc abc abc"), 60), ask("c", ids, regex=PATTERN), ask("d", ids, regex=PATTERN, temperature=1.0)
    )
    for rid in ("c", "d"):
        assert re.fullmatch(PATTERN, tokenizer.decode(found[rid])), tokenizer.decode(found[rid])
        assert one.ends[rid] == "stop"
    assert found["c"] == alone


def test_the_grammar_takes_each_accepted_token_once(engine: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    one = engine(*DRAFTING)
    found = one.answer(ask("c", tokenizer.encode("ababababab"), regex="(ab){4,40}"))["c"]
    events = [event for event in read(one.box_path).events if event.a == request_hash("c")]
    accepted = sum(event.b for event in events if event.kind is EventKind.accepted)
    advanced = sum(event.b for event in events if event.kind is EventKind.fsm_advance)
    assert accepted == advanced == len(found)
    assert one.box.counters["accepted_tokens"] > 0, "no draft was accepted: the test shows little"


def test_a_grammar_that_fails_ends_its_request_and_no_other(engine: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    one = engine(*DRAFTING)
    make = one.grammar.matcher

    class Failing:
        def __init__(self, inner: Any) -> None:
            self.inner, self.runs = inner, 0

        def masks(self, drafts: Any, out: Any) -> None:
            self.inner.masks(drafts, out)

        def advance(self, tokens: Any) -> int:
            self.runs += 1
            if self.runs > 3:
                raise RuntimeError("GrammarMatcher has terminated")
            return int(self.inner.advance(tokens))

    one.grammar.matcher = lambda key: Failing(make(key))  # type: ignore[method-assign, assignment, return-value]
    one.answer(ask("bad", tokenizer.encode("x"), regex="(ab){9,90}"), ask("free", tokenizer.encode("y"), 30))
    assert one.ends == {"bad": "error", "free": "length"}


@pytest.mark.parametrize("args", [DRAFTING, OVERLAP])
def test_a_grammar_that_costs_everybody_too_much_ends_its_request_and_no_other(
    engine: Callable[..., Engine], tokenizer: Tokenizer, args: tuple[str, ...]
) -> None:
    one = engine(*args)
    ebnf = 'root ::= s\ns ::= s s s | s s | "a" | "b" | "ab"'
    dear = msgspec.structs.replace(ask("dear", tokenizer.encode("x"), 400, logit_bias={EOS_ID: -100.0}), grammar=Grammar("ebnf", ebnf))
    said: list[Any] = []
    one.scheduler._send = lambda outputs: (said.extend(outputs.items), one._take(outputs))[-1]
    one.answer(dear, ask("free", tokenizer.encode("y"), 450))
    assert one.ends == {"dear": "error", "free": "length"}
    last = next(item for item in said if item.rid == "dear" and item.finish)
    assert last.blamed and last.ids == [] and "--grammar-step-budget" in last.error
    assert 20 < len(one.ids["dear"]) < 400
    assert re.fullmatch("[ab]+", tokenizer.decode(one.ids["dear"])), "what came before is of the grammar"


def test_log_probabilities_come_with_each_token_and_once_with_the_prompt(engine: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    one = engine("--chunked-prefill-size", "8")
    ids = tokenizer.encode("one two three four five")
    messages: list[Any] = []
    one.scheduler._send = lambda outputs: (messages.extend(outputs.items), one._take(outputs))[-1]
    request = ask("a", ids, 5)
    request.logprobs, request.prompt_logprobs = 2, 1
    one.answer(request)
    assert [len(message.logprobs) for message in messages] == [len(message.ids) for message in messages]
    scored = [message.prompt_logprobs for message in messages if message.prompt_logprobs]
    assert len(scored) == 1
    assert [score.token for score in scored[0]] == ids[1:]
    assert all(score.logprob <= 0 for score in scored[0])


def test_a_retracted_constrained_request_goes_on_where_it_was(model: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    args = ["--page-size", "8", "--max-running-requests", "4"]
    ids = {f"r{n}": tokenizer.encode(f"{n} abcd") for n in range(4)}
    wide = Engine(model, tmp_path, parse(args))
    wanted = {rid: wide.answer(ask(rid, prompt, 60, regex="(ab|cd){20,30}"))[rid] for rid, prompt in ids.items()}
    wide.close()
    (tmp_path / "tight").mkdir()
    tight = Engine(model, tmp_path / "tight", parse(args))
    taken = tight.scheduler.memory.pool.allocate(256 - 14)
    assert taken
    tight.scheduler.idle = lambda: None  # type: ignore[method-assign]
    found = tight.answer(*(ask(rid, prompt, 60, regex="(ab|cd){20,30}") for rid, prompt in ids.items()))
    tight.close()
    assert tight.box.counters["retractions"] > 0
    assert found == wanted


def test_preparation_of_the_next_batch_lies_inside_the_device_step(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = tiny_model(tmp_path / "wide", layers=8, hidden=512, heads=8, kv_heads=4)  # a step that takes milliseconds
    one = Engine(model, tmp_path, parse(["--page-size", "8", *OVERLAP]))
    one.answer(ask("a", tokenizer.encode("hello"), 40))
    one.close()
    events = read(one.box_path).events
    begun = {event.a: event.mono_ns for event in events if event.kind is EventKind.device_begin}
    ended = {event.a: event.mono_ns for event in events if event.kind is EventKind.device_end}
    first = {event.a: event.mono_ns for event in events if event.kind is EventKind.prepare_begin}
    last = {event.a: event.mono_ns for event in events if event.kind is EventKind.prepare_end}
    inside = [step for step in last if step - 1 in ended and begun[step - 1] <= first[step] <= last[step] <= ended[step - 1]]
    assert len(inside) > 20, "steps are prepared only when the device is done"
