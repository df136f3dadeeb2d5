"""A Hugging Face folder's config.json and generation_config.json, read and checked. Imports no torch.

Meanings and defaults are those of transformers 5. What would change the model's output and is not supported is
refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class ModelConfigError(ValueError):
    """A model that cannot be served; the text names the file, the key and what would do."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Fields after ``kind`` matter to the kinds that their comment names."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_context: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are of the whole model, before it is split over ranks."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rms_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # of each layer: how many positions a token sees, its own included; 0: all
    eos_ids: tuple[int, ...]
    bos_id: int | None
    torch_dtype: str  # float32, bfloat16 or float16, as stored


def read_config(folder: Path | str) -> ModelConfig:
    """Read and check a model folder.

    Raises:
        ModelConfigError: a file is missing or broken, or asks for something that is not supported.
    """
    folder = Path(folder)
    path = folder / "config.json"
    raw = _Keys(path, _read_json(path))
    architecture = _architecture(raw)
    family = architecture.removesuffix("ForCausalLM").lower()
    layers = raw.count("num_hidden_layers")
    hidden = raw.count("hidden_size")
    heads = raw.count("num_attention_heads")
    context = raw.count("max_position_embeddings", {"llama": 2048, "mistral": 131072}.get(family, 32768))
    head_dim = raw.count("head_dim", 128 if family == "qwen3" else hidden // heads)
    kv_heads = raw.count("num_key_value_heads", {"mistral": 8}.get(family, heads))
    if heads % kv_heads:
        raise raw.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} query heads")
    if head_dim % 2:
        raise raw.error("head_dim", f"{head_dim} is odd, and rotary embedding turns pairs")
    raw.only("hidden_act", ("silu",), "silu")
    raw.only("quantization_config", (None,), None)
    raw.only("partial_rotary_factor", (None, 1, 1.0), None)
    attention_bias = family in ("llama", "qwen3") and raw.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=raw.count("intermediate_size"),
        vocab=raw.count("vocab_size"),
        context=context,
        rms_eps=raw.number("rms_norm_eps", 1e-6),
        rope=_rope(raw, context),
        tied=raw.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and raw.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, layers),
        eos_ids=_eos_ids(folder, raw),
        bos_id=raw.get("bos_token_id") if isinstance(raw.get("bos_token_id"), int) else None,
        torch_dtype=_dtype(raw),
    )


@dataclass(frozen=True)
class _Keys:
    """A JSON object that knows its file, so that errors name it."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def error(self, key: str, text: str) -> ModelConfigError:
        return ModelConfigError(f"{self.path}: {self.prefix}{key}: {text}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"{value!r} is not a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"{value!r} is not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not true or false")
        return value

    def only(self, key: str, good: tuple[Any, ...], default: Any) -> None:
        value = self.values.get(key, default)
        if value not in good:
            raise self.error(key, f"{json.dumps(value)} is not supported, only {' or '.join(json.dumps(g) for g in good)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror or error}; --model needs a Hugging Face folder") from error
    except ValueError as error:
        raise ModelConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{path}: not a JSON object")
    return found


def _architecture(raw: _Keys) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise raw.error("architectures", f"{names!r} does not name one architecture; supported: {', '.join(ARCHITECTURES)}")
    if names[0] not in ARCHITECTURES:
        raise raw.error("architectures", f"{names[0]} is not supported; these are: {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _rope(raw: _Keys, context: int) -> Rope:
    """``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` beside each other (before)."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key) or {}
    if not isinstance(given, dict):
        raise raw.error(key, f"{given!r} is not an object")
    rope = _Keys(raw.path, given, f"{key}.")
    theta = rope.number("rope_theta", raw.number("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("full_attention", "sliding_attention") or "full_attention" in given:
        raise raw.error(key, "a different rotary embedding for each kind of layer is not supported")
    if kind == "dynamic":
        raise rope.error("rope_type", "dynamic is not supported: it changes the frequencies of keys that are already in the cache; "
                         "remove it (it has no effect below max_position_embeddings) or use yarn")  # fmt: skip
    if kind not in ROPE_KINDS:
        raise rope.error("rope_type", f"{kind!r} is not supported; these are: {', '.join(ROPE_KINDS)}")
    rope.only("partial_rotary_factor", (None, 1, 1.0), None)
    if kind == "default":
        return Rope(theta)
    original = raw.count("original_max_position_embeddings", rope.count("original_max_position_embeddings", context))
    if kind == "linear":
        return Rope(theta, kind, rope.number("factor"))
    if kind == "llama3":
        return Rope(theta, kind, rope.number("factor"), original, rope.number("low_freq_factor"), rope.number("high_freq_factor"))

    def optional(name: str) -> float | None:
        return None if rope.get(name) is None else rope.number(name)

    return Rope(
        theta, kind, rope.number("factor", context / original), original, truncate=rope.flag("truncate", True),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0, beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=optional("attention_factor"), mscale=optional("mscale"), mscale_all_dim=optional("mscale_all_dim"),
    )  # fmt: skip


def _windows(raw: _Keys, family: str, layers: int) -> tuple[int, ...]:
    """Sliding windows: all layers of Mistral; of Qwen those that ``layer_types`` or ``max_window_layers`` say."""
    if family == "mistral":
        given = raw.values.get("sliding_window", 4096)
        window = 0 if given is None else raw.count("sliding_window", 4096)
        return (window,) * layers
    if family == "llama" or not raw.flag("use_sliding_window", False):
        return (0,) * layers
    window = raw.count("sliding_window", 4096) if raw.values.get("sliding_window", 4096) is not None else 0
    types = raw.get("layer_types")
    if types is None:
        first = raw.values.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise raw.error("layer_types", f"{types!r} does not say full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _eos_ids(folder: Path, raw: _Keys) -> tuple[int, ...]:
    """End-of-text ids of both files, generation_config.json's first."""
    ids: dict[int, None] = {}
    path = folder / "generation_config.json"
    sources = [_Keys(path, _read_json(path))] if path.exists() else []
    for source in (*sources, raw):
        given = source.get("eos_token_id")
        if given is None:
            continue
        for token in given if isinstance(given, list) else [given]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise source.error("eos_token_id", f"{token!r} is not a token id")
            ids[token] = None
    return tuple(ids)


def _dtype(raw: _Keys) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise raw.error("torch_dtype", f"{name!r} is not supported; these are: float32, bfloat16, float16")
    return str(name)
