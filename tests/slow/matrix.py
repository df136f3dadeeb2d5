"""``make matrix``: one text, whatever way it is computed.

Every combination of loop, tensor-parallel size, speculation and chunking serves the same prompts cold, from the
prefix cache, and all at once. In f32 each answer must be the reference's, token for token; the reference is
transformers' greedy text. In bf16 an answer may part from the first combination's only where the two likeliest tokens
tie: the gap between their log-probabilities is shown. After each combination the KV pool must be whole.

``python -m tests.slow.matrix [--dtype float32|bfloat16]`` prints the table; exit code 1 if a cell differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.serving import Served, serving, wait_for
from tests.tiny_models import tiny_model

TOKENS = 48
CHUNK = 32
TIE = 0.07  # twice the spacing of bf16 numbers between 4 and 8, where these models' logits lie
PROMPTS = (
    "a",
    "the cat sat on the mat and the cat sat on the mat and the cat sat",
    "once upon a midnight dreary, while I pondered, weak and weary, over many a quaint and curious volume of forgotten lore",
    "12345 12345 12345 12345 ",
    "one two three four five six seven eight nine ten " * 4,
)


@dataclass(frozen=True)
class Cell:
    loop: str
    tp: int
    speculation: str
    prefill: str

    @property
    def args(self) -> list[str]:
        found = ["--tp", str(self.tp), "--chunked-prefill-size", str(CHUNK) if self.prefill == "chunked" else "-1",
                 "--page-size", "8", "--max-total-tokens", "4096", "--grammar-backend", "none"]  # fmt: skip
        found.append("--enable-overlap-schedule" if self.loop == "overlap" else "--disable-overlap-schedule")
        if self.speculation == "ngram":
            found += ["--speculative-algorithm", "NGRAM"]
        return found


CELLS = [Cell(*parts) for parts in itertools.product(("overlap", "sequential"), (1, 2), ("off", "ngram"), ("whole", "chunked"))]


def ask(served: Served, prompt: str) -> list[tuple[str, float]]:
    """The answer's tokens, each with the gap to the second likeliest."""
    answer = served.complete(prompt, max_tokens=TOKENS, logprobs=2)
    scores = answer["choices"][0]["logprobs"]
    gaps = []
    for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        best = sorted(top.values(), reverse=True)
        gaps.append((token, best[0] - best[1] if len(best) > 1 else 9.0))
    return gaps


def serve_cell(cell: Cell, model: Path, folder: Path, dtype: str) -> tuple[dict[str, list[list[tuple[str, float]]]], dict[str, int]]:
    with serving(model, folder, *cell.args, "--dtype", dtype) as served:
        cold = [ask(served, prompt) for prompt in PROMPTS]
        hits = [ask(served, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: ask(served, prompt), PROMPTS))

        def idle() -> dict[str, int] | None:
            found = served.box(0).host
            return found.counters if not found.held and not found.counters["pages_pending"] else None

        counters: dict[str, int] = wait_for(idle, 10, "an idle server")
        assert counters["pages_free"] + counters["pages_cached"] == counters["pages_total"], f"the pool is not whole: {counters}"
        assert served.stop() == 0, served.text()
    return {"cold": cold, "hit": hits, "together": together}, counters


def reference(model: Path) -> list[list[str]]:
    """transformers' greedy text, as the server shows tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.no_grad():
            out = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                                  eos_token_id=None, pad_token_id=0)  # fmt: skip
        texts.append([tokenizer.token_text(token) for token in out[0, ids.shape[1] :].tolist()])
    return texts


def parted(got: list[tuple[str, float]], wanted: list[Any], *, tie: float) -> str:
    """Where an answer parts from the wanted one; empty if it does not (or only at a tie)."""
    for at, ((token, gap), want) in enumerate(zip(got, wanted, strict=True)):
        want_token = want if isinstance(want, str) else want[0]
        if token != want_token:
            return "" if gap <= tie else f"token {at}: {token!r}, not {want_token!r} (gap {gap:.3f})"
    return ""


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="only the first N combinations")
    found = parser.parse_args(args)
    failed = 0
    print(f"{'loop':11} tp {'speculation':11} {'prefill':8} {'cold':5} {'hit':5} {'together':8} prefix-cached drafted accepted")
    with tempfile.TemporaryDirectory(prefix="lastbatch-matrix-") as scratch:
        model = tiny_model(Path(scratch) / "model", layers=3, heads=4, kv_heads=2, hidden=64, seed=3, dtype=found.dtype)
        wanted: list[Any] = list(reference(model)) if found.dtype == "float32" else []
        for number, cell in enumerate(CELLS[: found.cells]):
            answers, counters = serve_cell(cell, model, Path(scratch) / str(number), found.dtype)
            wanted = wanted or answers["cold"]
            words = {}
            for way, texts in answers.items():
                parts = [parted(text, want, tie=0.0 if found.dtype == "float32" else TIE) for text, want in zip(texts, wanted, strict=True)]
                bad = [part for part in parts if part]
                failed += len(bad)
                words[way] = "same" if not bad else bad[0]
            print(f"{cell.loop:11} {cell.tp:<2} {cell.speculation:11} {cell.prefill:8} "
                  f"{words['cold']:5} {words['hit']:5} {words['together']:8} "
                  f"{counters['cached_tokens']:13} {counters['drafted_tokens']:7} {counters['accepted_tokens']:8}", flush=True)  # fmt: skip
    print(f"{found.dtype}: {'every answer is the same' if not failed else f'{failed} answers part'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
