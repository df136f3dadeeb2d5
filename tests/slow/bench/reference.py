"""transformers' own generate: bf16, greedy, one static batch, no server."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


class Reference:
    """``threads``: torch's; 0: one a core, as the engine takes."""

    def __init__(self, model: Path, threads: int = 0) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"

    def generate_s(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds in which each prompt of the batch (all of one length) gets exactly ``tokens`` tokens."""
        ids = self._torch.tensor([list(prompt) for prompt in prompts])
        started = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                                       do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
        took = time.perf_counter() - started
        if out.shape[1] != ids.shape[1] + tokens:
            raise RuntimeError(f"generate gave {out.shape[1] - ids.shape[1]} tokens, not {tokens}")
        return took
