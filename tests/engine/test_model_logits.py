"""Logits equal transformers' in f32 for every architecture, however the tokens reach the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.registry import load_model
from engine.native import build, kernels
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


def reference(folder: Path, texts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([list(text)])).logits[0] for text in texts]


@pytest.fixture(params=["kernels in C", "kernels in C and oneDNN", "torch"])
def bf16_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is what a CPU with AMX gets; it runs, more slowly, on any."""
    if request.param == "torch":
        monkeypatch.setattr("engine.native.kernels.load", lambda: None)
    elif request.param == "kernels in C and oneDNN":
        monkeypatch.setattr("engine.native.build.cpu_has", lambda *flags: True)


@pytest.fixture(params=["kernels in C", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr("engine.native.kernels.load", lambda: None)
    elif kernels.load() is None:
        pytest.skip(f"kernels: {build.paths()['kernels']}")
    return str(request.param)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_equal_transformers_in_prefill_chunks_decode_and_ragged_batches(name: str, implementation: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, **CONFIGURATIONS[name])
    model = load_model(folder, dtype="float32", group=Group(), device=torch.device("cpu"))
    assert model.paths()["layers"].startswith("torch" if implementation == "torch" else "C")
    texts = sample_texts(model.config.vocab)
    rows = Rows(model, texts)
    drive(rows)
    assert rows.done == [len(text) for text in texts]
    for row, expected in enumerate(reference(folder, texts)):
        difference = (rows.all_logits(row) - expected).abs().max().item()
        assert difference <= TOLERANCE, f"row {row} differs by {difference}"
        assert expected.std() > 0.1, "logits that are all alike would prove nothing"


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"arch": "llama", "hidden": 80, "heads": 5, "kv_heads": 1, "vocab": 528}, id="an odd number of panels"),
        pytest.param({"arch": "qwen2", "hidden": 56, "vocab": 509}, id="shapes that do not suit panels"),
        pytest.param({"arch": "qwen3", "tied": True, "head_dim": 64}, id="tied"),
    ],
)
def test_bfloat16_logits_stay_as_near_to_f32_as_transformers_own(model: dict[str, Any], bf16_implementation: None, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, dtype="bfloat16", **model)
    loaded = load_model(folder, dtype="auto", group=Group(), device=torch.device("cpu"))
    texts = sample_texts(loaded.config.vocab)
    rows = Rows(loaded, texts, dtype=torch.bfloat16)
    drive(rows)
    exact, rounded = reference(folder, texts), reference(folder, texts, torch.bfloat16)
    for row in range(len(texts)):
        error = (rows.all_logits(row) - exact[row]).square().mean().sqrt()
        theirs = (rounded[row].float() - exact[row]).square().mean().sqrt()
        assert error <= 1.25 * theirs


def test_logits_of_a_row_in_f32_are_the_same_whatever_shares_the_step(implementation: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    model = load_model(folder, dtype="float32", group=Group(), device=torch.device("cpu"))
    texts = sample_texts(model.config.vocab)
    together, alone = Rows(model, texts), Rows(model, texts)
    drive(together)
    alone.step({1: len(texts[1])})
    assert (together.all_logits(1) - alone.all_logits(1)).abs().max() <= 1e-5


def test_a_step_without_wanted_logits_gives_none_and_still_fills_the_cache(implementation: str, tmp_path: Path) -> None:
    model = load_model(tiny_model(tmp_path), dtype="float32", group=Group(), device=torch.device("cpu"))
    texts = sample_texts(model.config.vocab)
    whole, silent = Rows(model, texts), Rows(model, texts)
    whole.step({0: 30})
    assert silent.step({0: 20}, wanted=torch.zeros(0, dtype=torch.int64)).shape == (0, 512)
    last = silent.step({0: 10}, wanted=torch.tensor([9]))
    assert (last[0] - whole.all_logits(0)[29]).abs().max() <= 1e-5


def test_each_layer_of_a_long_step_is_announced_before_it_runs(implementation: str, tmp_path: Path) -> None:
    model = load_model(tiny_model(tmp_path, layers=3), dtype="float32", group=Group(), device=torch.device("cpu"))
    rows = Rows(model, [[5] * 100], pages_each=32)
    seen: list[int] = []
    rows.step({0: 100}, on_layer=seen.append)
    assert seen == [0, 1, 2]
