"""Random tiny Hugging Face folders on which a whole server can run, offline and in milliseconds.

A folder holds config.json, generation_config.json, model.safetensors (or two shards and an index), tokenizer.json,
tokenizer_config.json with a ChatML template (tools in Hermes style). The tokenizer is byte-level, so any text makes
the round trip; ids 0..2 are ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>`` (the end of a turn). Weights are
drawn from ``seed`` with a scale that keeps logits apart by more than rounding. Needs numpy only.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions. Their signatures are within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call return a JSON object within <tool_call></tool_call>:\\n' }}
{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set f = call.function if call.function else call %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def tiny_model(folder: Path | str, arch: str = "llama", heads: int = 4, kv_heads: int = 2, hidden: int = 64, layers: int = 2,
               vocab: int = 512, tied: bool = False, seed: int = 0, *, dtype: str = "float32", shards: int = 1,
               tokenizer: bool = True, **config: Any) -> Path:  # fmt: skip
    """Write a random model and return its folder.

    Args:
        arch: llama, mistral, qwen2 or qwen3.
        vocab: 259 or more with a tokenizer.
        dtype: float32 or bfloat16, of the stored weights.
        shards: files that the weights are spread over; above 1 an index is written.
        config: further keys of config.json (head_dim, intermediate_size, rope_scaling, attention_bias, ...).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name, model_type = ARCHITECTURES[arch]
    settings: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "torch_dtype": dtype,
        **({"sliding_window": None} if arch == "mistral" else {}),
        **config,
    }
    _write_json(folder / "config.json", settings)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": 0})
    _write_weights(folder, dict(_weights(settings, arch, np.random.default_rng(seed))), dtype, shards)
    if tokenizer:
        _write_tokenizer(folder, vocab, settings["max_position_embeddings"])
    return folder


def _weights(c: dict[str, Any], arch: str, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    hidden, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim

    def linear(name: str, rows: int, columns: int, biased: bool) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{name}.weight", rng.standard_normal((rows, columns), dtype=np.float32) / math.sqrt(columns)
        if biased:
            yield f"{name}.bias", rng.standard_normal(rows, dtype=np.float32) * 0.2

    def norm(name: str, size: int) -> tuple[str, np.ndarray]:
        return f"{name}.weight", 1 + rng.standard_normal(size, dtype=np.float32) * 0.1

    biased = bool(c.get("attention_bias", False))
    tied = c["tie_word_embeddings"]
    yield "model.embed_tokens.weight", rng.standard_normal((c["vocab_size"], hidden), dtype=np.float32) / (math.sqrt(hidden) if tied else 1)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield norm(f"{at}.input_layernorm", hidden)
        yield from linear(f"{at}.self_attn.q_proj", q, hidden, biased or arch == "qwen2")
        yield from linear(f"{at}.self_attn.k_proj", kv, hidden, biased or arch == "qwen2")
        yield from linear(f"{at}.self_attn.v_proj", kv, hidden, biased or arch == "qwen2")
        yield from linear(f"{at}.self_attn.o_proj", hidden, q, biased and arch in ("llama", "qwen3"))
        if arch == "qwen3":
            yield norm(f"{at}.self_attn.q_norm", head_dim)
            yield norm(f"{at}.self_attn.k_norm", head_dim)
        yield norm(f"{at}.post_attention_layernorm", hidden)
        for projection, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
            yield from linear(f"{at}.mlp.{projection}", rows, columns, bool(c.get("mlp_bias", False)))
    yield norm("model.norm", hidden)
    if not tied:
        yield from linear("lm_head", c["vocab_size"], hidden, False)


def _write_weights(folder: Path, weights: dict[str, np.ndarray], dtype: str, shards: int) -> None:
    if shards == 1:
        _write_safetensors(folder / "model.safetensors", weights, dtype)
        return
    names = list(weights)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        _write_safetensors(folder / file, part, dtype)
        index.update(dict.fromkeys(part, file))
    total = sum(array.size for array in weights.values()) * (2 if dtype == "bfloat16" else 4)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write_safetensors(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    """The safetensors format by hand: header length, JSON header, raw data (numpy has no bfloat16)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    at = 0
    for name, array in weights.items():
        data = _bfloat16(array).tobytes() if dtype == "bfloat16" else array.astype(np.float32).tobytes()
        header[name] = {"dtype": "BF16" if dtype == "bfloat16" else "F32", "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))


def _bfloat16(array: np.ndarray) -> np.ndarray:
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def _write_tokenizer(folder: Path, vocab: int, context: int) -> None:
    letters = _byte_letters()
    merges = _merges(letters, vocab - len(SPECIAL) - len(letters))
    tokens = [*SPECIAL, *letters, *(first + second for first, second in merges)]
    added = [
        {"id": n, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for n, token in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: n for n, token in enumerate(tokens)}, "merges": [list(pair) for pair in merges],
    }  # fmt: skip
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
        },
    )  # fmt: skip
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": False,
            "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "unk_token": SPECIAL[0],
            "chat_template": CHAT_TEMPLATE,
            "added_tokens_decoder": {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added},
        },
    )  # fmt: skip


def _merges(letters: list[str], count: int) -> list[tuple[str, str]]:
    """Pairs that common text and JSON hold, then all printable pairs until the vocabulary is full."""
    if count < 0:
        raise ValueError(f"vocab: a byte-level vocabulary with {len(SPECIAL)} special tokens needs {len(SPECIAL) + len(letters)} ids")
    space = letters[ord(" ")]
    common = [
        "th",
        "he",
        "in",
        "er",
        "an",
        "re",
        "on",
        "at",
        "en",
        "nd",
        "st",
        "or",
        "te",
        "es",
        "is",
        "it",
        "ar",
        "al",
        "to",
        "ha",
        "ed",
        "ou",
        "ng",
        '{"',
        '"}',
        '":',
        '",',
        "[{",
        "}]",
        "10",
        "20",
    ]
    common += [space + letter for letter in 'tasiowbcm"']
    printable = [
        *map(chr, range(ord("a"), ord("z") + 1)),
        *map(chr, range(ord("0"), ord("9") + 1)),
        *map(chr, range(ord("A"), ord("Z") + 1)),
    ]
    pairs: dict[tuple[str, str], None] = dict.fromkeys((token[0], token[1]) for token in common)
    pairs.update(dict.fromkeys(product(printable, repeat=2)))
    pairs.update(((first + second), third) for (first, second), third in product(list(pairs), printable))
    if count > len(pairs):
        raise ValueError(f"vocab: at most {len(pairs) + len(letters) + len(SPECIAL)} ids with a tokenizer; give tokenizer=False for more")
    return list(pairs)[:count]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
