"""Logits equal transformers' in f32 for every architecture, however the tokens reach the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.exec.batch import ForwardBatch
from engine.exec.kv import KVPool
from engine.model.registry import Model, load_model
from engine.parallel.group import Group
from tests.tiny_models import tiny_model

TOLERANCE = 1e-4
PAGE_SIZE = 4
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama one kv head, tied": {"arch": "llama", "heads": 4, "kv_heads": 1, "tied": True},
    "llama as many kv heads as heads": {"arch": "llama", "heads": 4, "kv_heads": 4, "hidden": 48, "layers": 3},
    "llama head_dim not hidden/heads": {"arch": "llama", "heads": 6, "kv_heads": 3, "hidden": 60, "head_dim": 16},
    "llama biases": {"arch": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"arch": "llama", "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "linear rope": {"arch": "llama", "rope_scaling": {"type": "linear", "factor": 3.0}},
    "yarn rope": {"arch": "llama", "rope_scaling": YARN},
    "yarn rope, mscale, no truncation": {
        "arch": "qwen2",
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    },
    "rope_parameters": {"arch": "qwen3", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": None},
    "mistral": {"arch": "mistral", "heads": 8, "kv_heads": 2},
    "mistral sliding window": {"arch": "mistral", "sliding_window": 7},
    "qwen2": {"arch": "qwen2", "tied": True},
    "qwen2 sliding in later layers": {
        "arch": "qwen2", "layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen2 bfloat16 weights": {"arch": "qwen2", "dtype": "bfloat16"},
    "qwen3": {"arch": "qwen3"},
    "qwen3 bias, tied, sharded file": {"arch": "qwen3", "heads": 4, "kv_heads": 4, "tied": True, "attention_bias": True, "shards": 3},
    "qwen3 head_dim 128": {"arch": "qwen3", "hidden": 40, "heads": 2, "kv_heads": 1, "head_dim": 128},
}  # fmt: skip


class Rows:
    """Sequences in one paged cache, whose pages are handed out in a scattered order."""

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], pages_each: int = 16) -> None:
        self.model = model
        self.texts = texts
        self.done = [0] * len(texts)
        total = pages_each * len(texts) + 1
        order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order[: pages_each * len(texts)].view(len(texts), pages_each).int()
        config = model.config
        self.kv = KVPool(config.layers, total, PAGE_SIZE, len(model.shard.kv_heads), config.head_dim, torch.float32)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]
        self.steps = 0

    def step(self, counts: dict[int, int]) -> None:
        """Give row i its next ``counts[i]`` tokens, in the order of the dict, and keep the logits of each."""
        tokens, positions, slots = [], [], []
        for row, count in counts.items():
            where = torch.arange(self.done[row], self.done[row] + count)
            tokens.append(torch.tensor(self.texts[row][self.done[row] : self.done[row] + count]))
            positions.append(where)
            slots.append(self.tables[row][where // PAGE_SIZE].long() * PAGE_SIZE + where % PAGE_SIZE)
            self.done[row] += count
        self.steps += 1
        batch = ForwardBatch(
            step=self.steps, tokens=torch.cat(tokens), positions=torch.cat(positions), slots=torch.cat(slots),
            query_lens=tuple(counts.values()), kv_lens=tuple(self.done[row] for row in counts),
            page_tables=self.tables[list(counts)], page_size=PAGE_SIZE, logit_rows=torch.arange(sum(counts.values())),
        )  # fmt: skip
        batch.check()
        logits = self.model.forward(batch, self.kv, None)
        assert logits.dtype is torch.float32
        assert logits.shape == (sum(counts.values()), self.model.config.vocab)
        for row, part in zip(counts, logits.split(list(counts.values())), strict=True):
            self.logits[row].append(part)

    def all_logits(self, row: int) -> torch.Tensor:
        return torch.cat(self.logits[row])


def reference(folder: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([list(text)])).logits[0] for text in texts]


def drive(rows: Rows) -> None:
    """Whole prefill, chunks, decode, a verify of several tokens, and all of them mixed in ragged batches."""
    rows.step({0: len(rows.texts[0]) - 6})
    rows.step({1: 9})
    rows.step({2: 5, 0: 1})
    rows.step({1: 13, 0: 1, 2: 4})
    rows.step({0: 1, 1: 1, 2: 1})
    rows.step({2: len(rows.texts[2]) - rows.done[2] - 1, 1: 5, 0: 2})
    rows.step({2: 1, 0: 1})
    rows.step({1: len(rows.texts[1]) - rows.done[1]})


def sample_texts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in (43, 35, 51)]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_equal_transformers_in_prefill_chunks_decode_and_ragged_batches(name: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, **CONFIGURATIONS[name])
    model = load_model(folder, dtype="float32", group=Group(), device=torch.device("cpu"))
    texts = sample_texts(model.config.vocab)
    rows = Rows(model, texts)
    drive(rows)
    assert rows.done == [len(text) for text in texts]
    for row, expected in enumerate(reference(folder, texts)):
        difference = (rows.all_logits(row) - expected).abs().max().item()
        assert difference <= TOLERANCE, f"row {row} differs by {difference}"
        assert expected.std() > 0.1, "logits that are all alike would prove nothing"
