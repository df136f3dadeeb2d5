"""What transformers says about a text: the reference of ``make eval``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = 32
"""Tokens of a greedy answer."""


@dataclass(frozen=True)
class Said:
    """One text by one way of computing it: ``scores[i]`` is the log-probability of token i + 1; the answer's tokens."""

    scores: tuple[float, ...]
    answer: tuple[str, ...]
    gaps: tuple[float, ...] = ()
    """Of each answered token: how far its log-probability is above the runner-up's (reference only)."""


class Reference:
    """transformers on the same folder. ``threads``: of torch; 0 leaves its own."""

    def __init__(self, model: Path, threads: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._torch, self._loader, self._model = torch, AutoModelForCausalLM, model
        if threads:
            torch.set_num_threads(threads)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._loaded: dict[str, Any] = {}

    def _load(self, dtype: str) -> Any:
        if dtype not in self._loaded:
            self._loaded[dtype] = self._loader.from_pretrained(self._model, dtype=getattr(self._torch, dtype)).eval()
        return self._loaded[dtype]

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def scores(self, dtype: str, prompts: Sequence[str], batch: int = 1, *, stepwise: bool = False) -> list[list[float]]:
        """Log-probability of each token after the first, the texts taken ``batch`` at a time and padded on the right.

        ``stepwise``: each text token by token through the KV cache, as when decoding.
        """
        torch, found = self._torch, []
        for first in range(0, len(prompts), batch):
            rows = [self.ids(text) for text in prompts[first : first + batch]]
            width = max(map(len, rows))
            padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            with torch.no_grad():
                # A token sees what stands before it, so padding on the right changes nothing and needs no mask.
                logits = self._stepwise(dtype, padded) if stepwise else self._load(dtype)(padded).logits
            likely = torch.log_softmax(logits.float(), dim=-1)
            found += [[likely[at, i, row[i + 1]].item() for i in range(len(row) - 1)] for at, row in enumerate(rows)]
        return found

    def _stepwise(self, dtype: str, ids: Any) -> Any:
        from transformers import DynamicCache

        model = self._load(dtype)
        cache = DynamicCache(config=model.config)
        steps = [model(ids[:, at : at + 1], cache=cache, use_cache=True).logits for at in range(ids.shape[1])]
        return self._torch.cat(steps, dim=1)

    def said(self, dtype: str, prompts: Sequence[str], show: Callable[[int], str], batch: int = 1) -> list[Said]:
        """Scores of each text alone, greedy answers ``batch`` at a time. ``show``: a token as the server writes it."""
        torch, model, found = self._torch, self._load(dtype), []
        scores = self.scores(dtype, prompts)
        for first in range(0, len(prompts), batch):
            rows = [self.ids(text) for text in prompts[first : first + batch]]
            width = max(map(len, rows))
            padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            with torch.no_grad():
                out = model.generate(padded, attention_mask=mask, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False,
                                     eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True)  # fmt: skip
            best = torch.log_softmax(torch.stack(out.logits, dim=1).float(), dim=-1).topk(2, dim=-1).values
            for at, answer in enumerate(out.sequences[:, width:].tolist()):
                gaps = (best[at, :, 0] - best[at, :, 1]).tolist()
                found.append(Said(tuple(scores[first + at]), tuple(map(show, answer)), tuple(gaps)))
        return found
