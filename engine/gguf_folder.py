"""A GGUF file of a Llama model, turned into the Hugging Face folder that every loader reads.

Weights are dequantised and rounded to bfloat16 a few megabytes at a time, without torch. Two facts are easy to get
wrong: the rows of ``attn_q`` and ``attn_k`` are permuted in GGUF (each head's rotary pairs are interleaved there,
halves apart in Hugging Face's layout), and GGUF gives shapes in reverse order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_ROWS = 4096  # dequantised at once: 9 MB of float32 at 576 columns
_SPECIAL_TOKEN = 3  # GGUF's token type "control"
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufError(ValueError):
    """The file is not one that can be turned into a folder; the text says which file and why."""


def convert(source: Path, folder: Path, sampling: Mapping[str, Any] | None = None) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja and
    model.safetensors (bfloat16) into ``folder``, which exists. ``sampling`` goes into generation_config.json.

    Raises:
        GgufError: another architecture, tokenizer or tensor than a Llama model with byte-level BPE has.
        OSError: reading or writing failed.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, KeyError, IndexError) as error:
        raise GgufError(f"{source}: not a GGUF file that can be read: {error}") from error
    fields = _Fields(source, reader)
    for key, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if fields[key] != wanted:
            raise GgufError(f"{source}: {key} is {fields[key]!r}; only {wanted!r} is read here")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _SPECIAL_TOKEN]
    template: str = fields["tokenizer.chat_template"]

    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {**ids, **(sampling or {})})
    _write_json(folder / "tokenizer.json", _tokenizer(tokens, fields["tokenizer.ggml.merges"], special))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokens[config[f"{name}_token_id"]] for name in ("bos", "eos", "pad")},
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "additional_special_tokens": [token for token in special if token in ("<|im_start|>", "<|im_end|>")],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    (folder / "chat_template.jinja").write_text(template)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    _write_weights(folder / "model.safetensors", [_weight(source, tensor, heads) for tensor in reader.tensors])


class _Fields:
    """The file's key/value pairs; a missing one is an error that names it."""

    def __init__(self, source: Path, reader: GGUFReader) -> None:
        self._source, self._reader = source, reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise GgufError(f"{self._source}: has no {key}")
        return field.contents()


def _config(fields: _Fields, *, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),  # stored as float32: 9.99999975e-06
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _tokenizer(tokens: list[str], merges: list[str], special: list[str]) -> dict[str, Any]:
    """tokenizer.json of SmolLM: each digit alone, then GPT-2's byte-level splitting and BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tree: dict[str, Any] = json.loads(made.to_str())
    return tree


@dataclass(frozen=True)
class _Weight:
    """One tensor under its Hugging Face name. ``order``: the rows in the order they are written, None: as they are."""

    name: str
    tensor: ReaderTensor
    shape: tuple[int, ...]
    order: npt.NDArray[np.intp] | None

    @property
    def nbytes(self) -> int:
        return 2 * int(np.prod(self.shape))

    def blocks(self) -> Iterator[npt.NDArray[np.uint16]]:
        """The values as bfloat16 bits, some rows at a time."""
        from gguf.quants import dequantize

        rows = self.tensor.data
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS] if self.order is None else rows[self.order[start : start + _ROWS]]
            yield _bfloat16(np.asarray(dequantize(block, self.tensor.tensor_type), dtype=np.float32))


def _weight(source: Path, tensor: ReaderTensor, heads: dict[str, int]) -> _Weight:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.name in _TOP:
        return _Weight(_TOP[tensor.name], tensor, shape, None)
    match tensor.name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER:
            order = _halves_apart(shape[0], heads[kind]) if kind in heads else None
            return _Weight(f"model.layers.{layer}.{_LAYER[kind]}.weight", tensor, shape, order)
    raise GgufError(f"{source}: tensor {tensor.name} is not one that a Llama model has")


def _halves_apart(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Which GGUF row stands at each Hugging Face row of q or k: pairs (2i, 2i+1) of a head become (i, i + half)."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of float32, rounded to nearest, ties to even, as torch does it. Values are finite."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _write_weights(path: Path, weights: list[_Weight]) -> None:
    """safetensors: the header's length (8 bytes), the header as JSON padded to 8 bytes, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        header[weight.name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [offset, offset + weight.nbytes]}
        offset += weight.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in weights:
            for block in weight.blocks():
                file.write(block.tobytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
