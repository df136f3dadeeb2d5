"""Logits equal transformers' in f32 for every architecture, however the tokens reach the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.registry import load_model
from engine.parallel.group import Group
from tests.engine.paged_rows import Rows, drive, sample_texts
from tests.tiny_models import tiny_model

TOLERANCE = 1e-4
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


def reference(folder: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([list(text)])).logits[0] for text in texts]


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
