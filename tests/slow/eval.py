"""``make eval``: what the server says about a text is what transformers says. The gate for every change of numbers.

For each text of tests/slow/texts the server gives each token's log-probability (``echo``) and continues the text
greedily, twice, so that the second answer comes from the prefix cache. In f32 every log-probability must lie within
1e-4 of transformers' and every answer must be the same. In bf16 no way of computing is the right one: the tolerance,
greatest and mean, is what transformers itself shows in the same run when it takes the same texts one by one, in
batches, and in a batch token by token; an answer may part from transformers' only where transformers' two likeliest
tokens lie closer together than that. How far each is from transformers' f32 is printed beside it.

``python -m tests.slow.eval [--dtype float32|bfloat16] [--tp 1,3] [--quick] [--model PATH] [--threads N] [--json]``
prints the table; exit code 1 when anything lies outside. ``--quick``: the first and the last combination of each type.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine import default_model
from engine.text.tokenizer import Tokenizer
from tests.e2e.serving import Served, serving
from tests.slow.eval_reference import ANSWER, Reference, Said

TEXTS = Path(__file__).with_name("texts")
CHUNK = 32
F32_TOLERANCE = 1e-4
BATCHES = ((2, False), (4, False), (12, False), (12, True))
"""(texts at once, token by token): the ways that transformers is held against itself."""
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Cell:
    dtype: str
    tp: int
    prefill: str
    speculation: str

    @property
    def args(self) -> list[str]:
        chunk = CHUNK if self.prefill == "chunked" else -1
        found = ["--dtype", self.dtype, "--tp", str(self.tp), "--chunked-prefill-size", str(chunk), "--max-total-tokens", "8192",
                 "--grammar-backend", "none"]  # fmt: skip
        return found + (["--speculative-algorithm", "NGRAM"] if self.speculation == "ngram" else [])


@dataclass(frozen=True)
class Distance:
    """Log-probabilities of two ways, over all tokens of all texts."""

    greatest: float
    mean: float
    tokens: int

    def __str__(self) -> str:
        return f"max {self.greatest:.2g}, mean {self.mean:.2g}"

    def within(self, limit: Distance) -> bool:
        return self.greatest <= limit.greatest and self.mean <= limit.mean


def distance(got: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> Distance:
    """How far apart two sets of log-probabilities lie. Raises ValueError when they are not of the same tokens."""
    apart = [abs(a - b) for one, other in zip(got, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    return Distance(max(apart), sum(apart) / len(apart), len(apart))


@dataclass(frozen=True)
class Parting:
    """Where an answer first says something else, and how far the reference's two likeliest tokens lie apart there."""

    at: int
    said: str
    wanted: str
    gap: float

    def __str__(self) -> str:
        return f"token {self.at}: {self.said!r}, not {self.wanted!r} (gap {self.gap:.4f})"


def parting(got: Sequence[str], wanted: Said) -> Parting | None:
    """None when the answers are the same."""
    for at, (token, want, gap) in enumerate(zip(got, wanted.answer, wanted.gaps, strict=True)):
        if token != want:
            return Parting(at, token, want, gap)
    return None


def texts(only: int = 0) -> dict[str, str]:
    found = {file.stem: file.read_text(encoding="utf-8") for file in sorted(TEXTS.glob("*.txt"))}
    return dict(list(found.items())[: only or None])


def ask(served: Served, prompt: str) -> tuple[Said, Said]:
    """What the server says of a text, and what it says when the text is in its prefix cache."""
    heard = served.complete(prompt, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    scores = heard["token_logprobs"]
    assert scores[0] is None, "the first token of a text has no probability"

    def answer() -> tuple[str, ...]:
        return tuple(served.complete(prompt, max_tokens=ANSWER, logprobs=0)["choices"][0]["logprobs"]["tokens"])

    return Said(tuple(scores[1:]), answer()), Said((), answer())


@dataclass(frozen=True)
class Outcome:
    """``apart``: the answers that part, at a tie or not; ``wrong``: those that may not."""

    cell: Cell
    distance: Distance
    apart: tuple[str, ...]
    wrong: tuple[str, ...]
    good: bool


def judge(cell: Cell, heard: Mapping[str, tuple[Said, Said]], wanted: Mapping[str, Said], limit: Distance) -> Outcome:
    """``limit``: how far log-probabilities may lie apart; in bf16 its greatest is also what counts as a tie."""
    found = distance([heard[name][0].scores for name in wanted], [said.scores for said in wanted.values()])
    tie = 0.0 if cell.dtype == "float32" else limit.greatest
    apart, wrong = [], []
    for name, want in wanted.items():
        for way, said in zip(("cold", "hit"), heard[name], strict=True):
            if where := parting(said.answer, want):
                apart.append(f"{name}, {way}: {where}")
                if where.gap > tie or cell.dtype == "float32":
                    wrong.append(apart[-1])
    return Outcome(cell, found, tuple(apart), tuple(wrong), found.within(limit) and not wrong)


def serve(cell: Cell, model: Path, folder: Path, prompts: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, tuple[Said, Said]]:
    with serving(model, folder, *cell.args, *more) as served:
        heard = {name: ask(served, prompt) for name, prompt in prompts.items()}
        assert served.stop() == 0, served.text()
    return heard


def tolerance(reference: Reference, dtype: str, prompts: Sequence[str], say: Callable[[str], None]) -> Distance:
    """f32: fixed. Else the widest that transformers shows between batch sizes."""
    if dtype == "float32":
        return Distance(F32_TOLERANCE, F32_TOLERANCE, 0)
    alone, shown = reference.scores(dtype, prompts), []
    for batch, stepwise in BATCHES:
        shown.append(distance(reference.scores(dtype, prompts, batch, stepwise=stepwise), alone))
        way = ", token by token," if stepwise else ""
        say(f"transformers {dtype}, batches of {batch}{way} against one by one: max {shown[-1].greatest:.4f}, mean {shown[-1].mean:.5f}")
    return Distance(max(one.greatest for one in shown), max(one.mean for one in shown), shown[0].tokens)


def own_partings(reference: Reference, dtype: str, wanted: Mapping[str, Said], show: Callable[[int], str]) -> str:
    """How often transformers' own answers part when it gives all of them in one batch."""
    prompts = texts()
    batched = reference.said(dtype, [prompts[name] for name in wanted], show, batch=len(wanted))
    gaps = [where.gap for said, want in zip(batched, wanted.values(), strict=True) if (where := parting(said.answer, want))]
    widest = f", at gaps up to {max(gaps):.3f}" if gaps else ""
    return f"transformers {dtype}, one batch of {len(wanted)} against one by one: {len(gaps)} of {len(wanted)} answers part{widest}"


def cells(dtypes: Sequence[str], tps: Sequence[int], quick: bool) -> dict[str, list[Cell]]:
    """The combinations of each type."""
    found = {dtype: [Cell(dtype, *rest) for rest in itertools.product(tps, ("whole", "chunked"), ("off", "ngram"))] for dtype in dtypes}
    return {dtype: [some[0], some[-1]] if quick else some for dtype, some in found.items()}


HEAD = "dtype    tp prefill speculation  apart: max     mean  from f32: max     mean  answers that part  verdict"


def row(outcome: Outcome, near: Distance, answers: int) -> str:
    """One line of the table, and one for each answer that parts. ``near``: the distance from transformers' f32."""
    cell, far = outcome.cell, outcome.distance
    verdict = "equal" if outcome.good else "OUTSIDE"
    line = (f"{cell.dtype:8} {cell.tp:<2} {cell.prefill:7} {cell.speculation:11} {far.greatest:11.2g} {far.mean:8.2g} "
            f"{near.greatest:14.2g} {near.mean:8.2g} {len(outcome.apart):7} of {answers:<6}  {verdict}")  # fmt: skip
    return "\n".join([line, *(f"    {'wrong' if one in outcome.wrong else 'at a tie'}: {one}" for one in outcome.apart)])


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make eval ARGS=...", description="Are the server's numbers transformers' numbers?")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="only this type [default: both]")
    parser.add_argument("--tp", default="1,3", help="tensor-parallel sizes [default: %(default)s]")
    parser.add_argument("--quick", action="store_true", help="only the first and the last combination of each type")
    parser.add_argument("--texts", type=int, default=0, help="only the first N texts [default: all]")
    parser.add_argument("--model", type=Path, help="Hugging Face folder [default: that of `lastbatch model path`]")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of a rank and of torch [default: theirs]")
    parser.add_argument("--json", action="store_true", help="print one JSON envelope")
    options = parser.parse_args(args)
    model = options.model or default_model.path()
    prompts = texts(options.texts)

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    reference = Reference(model, options.threads)
    tokenizer = Tokenizer.load(model)
    asked = cells(options.dtype or DTYPES, [int(tp) for tp in options.tp.split(",")], options.quick)
    outcomes: list[Outcome] = []
    limits: dict[str, Distance] = {}
    exact = dict(zip(prompts, reference.scores("float32", list(prompts.values())), strict=True))
    with tempfile.TemporaryDirectory(prefix="lastbatch-eval-") as scratch:
        for dtype, some in asked.items():
            wanted = dict(zip(prompts, reference.said(dtype, list(prompts.values()), tokenizer.token_text), strict=True))
            limit = limits[dtype] = tolerance(reference, dtype, list(prompts.values()), say)
            own = distance([said.scores for said in wanted.values()], list(exact.values()))
            say(f"{model.name}, {dtype}: {len(prompts)} texts, {own.tokens} log-probabilities; tolerance: {limit}")
            if dtype != "float32":
                say(f"transformers {dtype} against its own f32: {own}")
                say(own_partings(reference, dtype, wanted, tokenizer.token_text))
            say(HEAD)
            for cell in some:
                heard = serve(cell, model, Path(scratch) / str(len(outcomes)), prompts, ["--threads-per-rank", str(options.threads)])
                outcomes.append(judge(cell, heard, wanted, limit))
                say(row(outcomes[-1], distance([heard[name][0].scores for name in exact], list(exact.values())), 2 * len(prompts)))
    failed = sum(not outcome.good for outcome in outcomes)
    say(
        f"{failed} of {len(outcomes)} combinations lie outside"
        if failed
        else f"all {len(outcomes)} combinations say what transformers says"
    )
    if options.json:
        data = {"model": model.name, "limits": {dtype: asdict(one) for dtype, one in limits.items()},
                "outcomes": [asdict(outcome) for outcome in outcomes]}  # fmt: skip
        status = "error" if failed else "ok"
        print(json.dumps({"schema": 1, "command": "eval", "status": status, "exit_code": int(bool(failed)), "errors": [], "data": data}))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
