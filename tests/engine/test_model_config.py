"""Model folders: what is read from them, and the errors for what is broken or not supported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.hf_config import ModelConfigError, Rope, read_config
from engine.model.registry import load_model
from engine.parallel.group import Group
from tests.tiny_models import tiny_model


def test_a_configuration_is_read_without_torch(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    program = (
        f"import sys; from engine.model.hf_config import read_config; read_config({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=30).returncode == 0


def test_sizes_and_end_of_text_ids_are_read_from_both_files(tmp_path: Path) -> None:
    tiny_model(tmp_path, heads=6, kv_heads=3, hidden=60, head_dim=16, eos_token_id=[7, 2])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    config = read_config(tmp_path)
    assert (config.heads, config.kv_heads, config.hidden, config.head_dim) == (6, 3, 60, 16)
    assert config.eos_ids == (2, 5, 7)
    assert config.windows == (0, 0)
    assert config.rope == Rope(10000.0)


def test_a_folder_without_generation_config_uses_the_ids_of_config_json(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert read_config(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"config\.json: architectures: GPT2LMHeadModel is not supported; these are: LlamaForCausalLM",
        ),
        ({"architectures": None}, r"config\.json: architectures: None does not name one architecture"),
        ({"hidden_act": "gelu"}, r'config\.json: hidden_act: "gelu" is not supported, only "silu"'),
        ({"quantization_config": {"quant_method": "gptq"}}, r"config\.json: quantization_config: .*gptq.* is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"config\.json: rope_scaling\.rope_type: dynamic is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"config\.json: rope_scaling\.rope_type: 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"config\.json: rope_scaling\.factor: is missing"),
        ({"partial_rotary_factor": 0.5}, r"config\.json: partial_rotary_factor: 0\.5 is not supported"),
        ({"num_key_value_heads": 3}, r"config\.json: num_key_value_heads: 3 does not divide the 4 query heads"),
        ({"hidden_size": "64"}, r"config\.json: hidden_size: '64' is not a whole number above 0"),
        ({"intermediate_size": None}, r"config\.json: intermediate_size: is missing"),
        ({"head_dim": 15}, r"config\.json: head_dim: 15 is odd"),
        ({"torch_dtype": "float8"}, r"config\.json: torch_dtype: 'float8' is not supported"),
        ({"eos_token_id": "x"}, r"config\.json: eos_token_id: 'x' is not a token id"),
    ],
)
def test_what_is_not_supported_is_refused_by_file_and_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelConfigError, match=message):
        read_config(tmp_path)


def test_a_missing_folder_and_broken_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"nowhere/config\.json: No such file.*--model needs a Hugging Face folder"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json: not JSON"):
        read_config(tmp_path)


def change_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(shards: int, tmp_path: Path) -> None:
    def load() -> None:
        load_model(tmp_path, group=Group(), device=torch.device("cpu"))

    tiny_model(tmp_path, shards=shards)
    change_config(tmp_path, intermediate_size=96)
    with pytest.raises(ModelConfigError, match=r"mlp\.gate_proj\.weight is \[128, 64\], config\.json asks for \[96, 64\]"):
        load()
    change_config(tmp_path, intermediate_size=128, num_hidden_layers=3)
    with pytest.raises(ModelConfigError, match=r"has no model\.layers\.2\.input_layernorm\.weight"):
        load()
    change_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelConfigError, match=r"model\.layers\.1\.\S+ has no place in this architecture"):
        load()


def test_a_bias_that_the_architecture_has_no_place_for_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path, attention_bias=True)
    change_config(tmp_path, attention_bias=False)
    with pytest.raises(ModelConfigError, match=r"_proj\.bias has no place in this architecture"):
        load_model(tmp_path, group=Group(), device=torch.device("cpu"))


def test_a_damaged_or_missing_weight_file_is_named(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelConfigError, match=r"model\.safetensors: "):
        load_model(tmp_path, group=Group(), device=torch.device("cpu"))
    weights.unlink()
    with pytest.raises(ModelConfigError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tmp_path, group=Group(), device=torch.device("cpu"))
