"""The parts of the bench. Each starts its servers, measures in turns, and gives pairs of figures."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.e2e.serving import Served, serving
from tests.slow.bench import client, rollouts, watched
from tests.slow.bench.figures import Pair
from tests.slow.bench.machine import Load, load
from tests.slow.bench.prompts import QUESTION, SCHEMA, random_ids, several
from tests.slow.bench.reference import Reference

WARM_UP_TOKENS = 4
LONG_ANSWER = 2000
CONSTRAINT = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA, "strict": True}}}


@dataclass(frozen=True)
class Sizes:
    """How much is measured. ``constrained``: most tokens of a JSON answer."""

    reps: int = 5
    prompt: int = 128
    tokens: int = 128
    streams: tuple[int, ...] = (1, 4, 16)
    prefills: tuple[int, ...] = (128, 1024)
    constrained: int = 260
    refusals: int = 2000
    beside: int = 16


QUICK = Sizes(reps=1, tokens=16, streams=(1, 4), prefills=(128,), refusals=30, beside=4)


@dataclass
class Bench:
    """What the parts share: the model's folder, the reference (loaded when first asked for), the draw of prompts."""

    model: Path
    scratch: Path
    sizes: Sizes
    threads: int = 0
    say: Callable[[str], None] = lambda text: None
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    loads: dict[str, Load] = field(default_factory=dict)
    _reference: Reference | None = None
    _started: int = 0

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            self._reference = Reference(self.model, self.threads)
        return self._reference

    @property
    def vocab(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    @property
    def context(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["max_position_embeddings"])

    @contextlib.contextmanager
    def server(self, *args: str) -> Iterator[str]:
        """The address of a server that is ready and has answered one request."""
        with self.served(*args) as served:
            yield served.url

    @contextlib.contextmanager
    def served(self, *args: str) -> Iterator[Served]:
        self._started += 1
        common = ["--dtype", "bfloat16", "--max-total-tokens", "49152", "--threads-per-rank", str(self.threads)]
        with serving(self.model, self.scratch, *common, *args, name=f"server-{self._started}") as served:
            client.complete(served.url, random_ids(self.draw, self.sizes.prompt, self.vocab), WARM_UP_TOKENS)
            yield served

    def turns(self, part: str, what: str) -> Iterator[int]:
        for turn in range(self.sizes.reps):
            self.say(f"{part}: {what}, repetition {turn + 1} of {self.sizes.reps}")
            yield turn

    def note_load(self, part: str) -> None:
        """Called when the part's servers stand ready and idle."""
        self.loads[part] = load()
        self.say(f"{part}: {self.loads[part]}")


def throughput(bench: Bench) -> list[Pair]:
    """Tokens per second, prefill included, of 1, 4 and 16 requests at once; transformers gets them as one batch."""
    sizes, pairs = bench.sizes, []
    with bench.server() as url:
        reference = bench.reference
        bench.note_load("throughput")
        for streams in sizes.streams:
            ours, other = [], []
            warm = several(bench.draw, streams, sizes.prompt, bench.vocab)
            client.together(url, warm, WARM_UP_TOKENS)
            reference.generate_s(warm, WARM_UP_TOKENS)
            for _ in bench.turns("throughput", f"{streams} at once"):
                prompts = several(bench.draw, streams, sizes.prompt, bench.vocab)
                ours.append(client.together(url, prompts, sizes.tokens))
                other.append(streams * sizes.tokens / reference.generate_s(prompts, sizes.tokens))
            pairs.append(Pair("throughput", f"{streams} at once", "tok/s", "engine", tuple(ours), "transformers", tuple(other)))
    return pairs


def first_token(bench: Bench) -> list[Pair]:
    """Time to the first token of a prompt that nobody has sent before."""
    sizes, pairs = bench.sizes, []
    with bench.server() as url:
        reference = bench.reference
        bench.note_load("first-token")
        for length in sizes.prefills:
            ours, other = [], []
            client.complete(url, random_ids(bench.draw, length, bench.vocab), 1)
            reference.generate_s([random_ids(bench.draw, length, bench.vocab)], 1)
            for _ in bench.turns("first-token", f"{length} tokens"):
                prompt = random_ids(bench.draw, length, bench.vocab)
                ours.append(1000 * client.complete(url, prompt, 1).first_token_s)
                other.append(1000 * reference.generate_s([prompt], 1))
            pairs.append(Pair("first-token", f"prompt of {length}", "ms", "engine", tuple(ours), "transformers", tuple(other)))
    return pairs


def constrained(bench: Bench) -> list[Pair]:
    """Decoding under a JSON schema against the same question without one; each answer must be whole, valid JSON."""
    sizes = bench.sizes
    question = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": sizes.constrained}
    ours, other, whole = [], [], 0
    with bench.server() as url:
        bench.note_load("json")
        client.stream(url, "/v1/chat/completions", {**question, **CONSTRAINT})  # the schema is compiled once
        for _ in bench.turns("json", "constrained and free"):
            answered = client.stream(url, "/v1/chat/completions", {**question, **CONSTRAINT})
            ours.append(answered.decode_tokens_per_s)
            if answered.finish == "stop":
                whole += len(json.loads(answered.text)["items"]) == 6
            other.append(client.stream(url, "/v1/chat/completions", {**question, "ignore_eos": True}).decode_tokens_per_s)
    note = f"{whole} of {sizes.reps} answers end and are valid"
    return [Pair("json", "decoding, 1 stream", "tok/s", "JSON schema", tuple(ours), "free", tuple(other), note)]


def _two_servers(bench: Bench, part: str, ours: tuple[str, tuple[str, ...]], other: tuple[str, tuple[str, ...]],
                 ways: Mapping[str, bool], streams: tuple[int, ...]) -> list[Pair]:  # fmt: skip
    """Throughput of two settings (name, arguments) side by side. ``ways``: kind of prompt -> is it repetitive."""
    sizes, pairs = bench.sizes, []
    with ExitStack() as stack:
        urls = [stack.enter_context(bench.server(*args)) for _, args in (ours, other)]
        bench.note_load(part)
        for way, repetitive in ways.items():
            for count in streams:
                label = f"{way}, {count} at once"
                found: tuple[list[float], list[float]] = ([], [])
                for url in urls:
                    client.together(url, several(bench.draw, count, sizes.prompt, bench.vocab, repetitive=repetitive), WARM_UP_TOKENS)
                for turn in bench.turns(part, label):
                    prompts = several(bench.draw, count, sizes.prompt, bench.vocab, repetitive=repetitive)
                    for at in (0, 1) if turn % 2 == 0 else (1, 0):
                        found[at].append(client.together(urls[at], prompts, sizes.tokens))
                pairs.append(Pair(part, label, "tok/s", ours[0], tuple(found[0]), other[0], tuple(found[1])))
    return pairs


def ngram(bench: Bench) -> list[Pair]:
    """n-gram speculation on and off, on text with and without repetition."""
    return _two_servers(bench, "ngram", ("n-gram", ("--speculative-algorithm", "NGRAM")), ("off", ()),
                        {"random": False, "repetitive": True}, bench.sizes.streams)  # fmt: skip


def loops(bench: Bench) -> list[Pair]:
    """The overlapped loop against the sequential one: the faster should be the default on this kind of machine."""
    return _two_servers(bench, "loops", ("overlap", ("--enable-overlap-schedule",)), ("sequential", ("--disable-overlap-schedule",)),
                        {"random": False}, bench.sizes.streams)  # fmt: skip


def refusal(bench: Bench) -> list[Pair]:
    """How fast ``--grammar-backend none`` refuses a constrained request, idle and while the engine is busy."""
    sizes = bench.sizes
    body = {"messages": [{"role": "user", "content": QUESTION}], **CONSTRAINT}
    idle: list[list[float]] = []
    busy: list[list[float]] = []
    with bench.server("--grammar-backend", "none") as url:
        bench.note_load("refusal")
        client.refusals(url, body, 10)
        for _ in bench.turns("refusal", f"{sizes.refusals} requests idle and beside {sizes.beside} streams"):
            idle.append(sorted(client.refusals(url, body, sizes.refusals)))
            prompts = several(bench.draw, sizes.beside, sizes.prompt, bench.vocab)
            with client.Background(url, prompts, min(LONG_ANSWER, bench.context - sizes.prompt - 1)) as streams:
                busy.append(sorted(client.refusals(url, body, sizes.refusals)))
                if not streams.running:
                    raise RuntimeError("a stream ended before the last refusal; nothing was measured under load")

    def figures(times: list[list[float]], share: float) -> tuple[float, ...]:
        return tuple(1000 * one[min(int(share * len(one)), len(one) - 1)] for one in times)

    return [Pair("refusal", name, "ms", f"beside {sizes.beside} streams", figures(busy, share), "idle", figures(idle, share))
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))]  # fmt: skip


PARTS: Mapping[str, Callable[[Bench], list[Pair]]] = MappingProxyType(
    {
        "throughput": throughput,
        "first-token": first_token,
        "json": constrained,
        "ngram": ngram,
        "loops": loops,
        "refusal": refusal,
        "rollout": rollouts.rollout,
        "monitor": watched.monitor,
    }
)
