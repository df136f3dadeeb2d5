"""Weights from safetensors, each rank reading only its part, laid into one block of memory.

Query, key and value matrices become one matrix, gate and up another, so that a layer takes four matrix products.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model.hf_config import ModelConfig, ModelConfigError
from engine.model.shard import Shard

_HUGE_PAGE_BYTES = 2 << 20
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class LayerWeights:
    """One layer, this rank's part. Matrices are [rows out, columns in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    """``embed`` and ``head`` are [vocab_rows, hidden], the same tensor if the model ties them."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(folder: Path, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read this rank's weights.

    Raises:
        ModelConfigError: a file or tensor is missing, has another shape, or is one that the model has no use for.
    """
    checkpoint = Checkpoint(folder)
    arena = _Arena(_total_bytes(config, shard, dtype), device)
    reader = _Reader(checkpoint, arena, dtype)
    vocab, hidden = config.vocab, config.hidden
    embed = arena.take((shard.vocab_rows, hidden), dtype)
    reader.fill(embed, [("model.embed_tokens.weight", (vocab, hidden), shard.vocab, None)])
    layers = tuple(_layer(reader, config, shard, layer) for layer in range(config.layers))
    norm = reader.whole("model.norm.weight", (hidden,))
    head = embed
    if config.tied:
        checkpoint.used.add("lm_head.weight")  # some folders store the tied matrix twice
    else:
        head = arena.take((shard.vocab_rows, hidden), dtype)
        reader.fill(head, [("lm_head.weight", (vocab, hidden), shard.vocab, None)])
    checkpoint.check_all_used()
    return Weights(embed, layers, norm, head)


def _layer(reader: _Reader, config: ModelConfig, shard: Shard, layer: int) -> LayerWeights:
    at = f"model.layers.{layer}."
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    size, hidden, inner = config.head_dim, config.hidden, config.intermediate
    heads = _times(shard.heads, size)
    kv_heads = _times(shard.kv_heads, size)
    q_size, kv_size = config.heads * size, config.kv_heads * size
    qkv = [("q_proj", q_size, heads), ("k_proj", kv_size, kv_heads), ("v_proj", kv_size, kv_heads)]
    gate_up = [("gate_proj", inner, shard.inner), ("up_proj", inner, shard.inner)]
    first = shard.rank == 0
    return LayerWeights(
        input_norm=reader.whole(f"{at}input_layernorm.weight", (hidden,)),
        qkv=reader.rows([(f"{attention}{name}.weight", (rows, hidden), part) for name, rows, part in qkv]),
        qkv_bias=reader.rows([(f"{attention}{name}.bias", (rows,), part) for name, rows, part in qkv]) if config.qkv_bias else None,
        q_norm=reader.whole(f"{attention}q_norm.weight", (size,)) if config.qk_norm else None,
        k_norm=reader.whole(f"{attention}k_norm.weight", (size,)) if config.qk_norm else None,
        o=reader.columns(f"{attention}o_proj.weight", (hidden, q_size), heads),
        o_bias=reader.whole(f"{attention}o_proj.bias", (hidden,), keep=first) if config.o_bias else None,
        post_norm=reader.whole(f"{at}post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.rows([(f"{mlp}{name}.weight", (rows, hidden), part) for name, rows, part in gate_up]),
        gate_up_bias=reader.rows([(f"{mlp}{name}.bias", (rows,), part) for name, rows, part in gate_up]) if config.mlp_bias else None,
        down=reader.columns(f"{mlp}down_proj.weight", (hidden, inner), shard.inner),
        down_bias=reader.whole(f"{mlp}down_proj.bias", (hidden,), keep=first) if config.mlp_bias else None,
    )


class Checkpoint:
    """The safetensors files of a folder: one file, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self.used: set[str] = set()
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._open: dict[Path, Any] = {}
        if index.exists():
            try:
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError) as error:
                raise ModelConfigError(f"{index}: no weight_map could be read from it: {error!r}") from error
            self._files = {name: folder / file for name, file in files.items()}
        elif single.exists():
            self._files = dict.fromkeys(self._handle(single).keys(), single)
        else:
            raise ModelConfigError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")
        self.source = index if index.exists() else single

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelConfigError(f"{path}: {error}") from error
        return self._open[path]

    def slice(self, name: str, shape: tuple[int, ...]) -> Any:
        """A lazy slice of a tensor, whose whole shape is checked."""
        path = self._files.get(name)
        if path is None:
            raise ModelConfigError(f"{self.source}: has no {name}")
        self.used.add(name)
        try:
            found = self._handle(path).get_slice(name)
        except SafetensorError as error:
            raise ModelConfigError(f"{path}: {name}: {error}") from error
        if tuple(found.get_shape()) != shape:
            raise ModelConfigError(f"{path}: {name} is {found.get_shape()}, config.json asks for {list(shape)}")
        return found

    def check_all_used(self) -> None:
        left = sorted(name for name in self._files if name not in self.used and not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ModelConfigError(f"{self.source}: {left[0]} has no place in this architecture ({len(left)} such tensors)")


class _Reader:
    def __init__(self, checkpoint: Checkpoint, arena: _Arena, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._arena = arena
        self._dtype = dtype

    def whole(self, name: str, shape: tuple[int, ...], *, keep: bool = True) -> torch.Tensor:
        """A tensor as it is; all zero if not ``keep`` (it is checked all the same)."""
        into = self._arena.take(shape, self._dtype)
        found = self._checkpoint.slice(name, shape)
        if keep:
            into.copy_(found[:])
        return into

    def rows(self, parts: list[tuple[str, tuple[int, ...], range]]) -> torch.Tensor:
        """Row ranges of several tensors, one below the other."""
        rows = sum(len(part) for _, _, part in parts)
        into = self._arena.take((rows, *parts[0][1][1:]), self._dtype)
        self.fill(into, [(name, shape, part, None) for name, shape, part in parts])
        return into

    def columns(self, name: str, shape: tuple[int, int], part: range) -> torch.Tensor:
        into = self._arena.take((shape[0], len(part)), self._dtype)
        self.fill(into, [(name, shape, range(shape[0]), part)])
        return into

    def fill(self, into: torch.Tensor, parts: list[tuple[str, tuple[int, ...], range, range | None]]) -> None:
        at = 0
        for name, shape, rows, columns in parts:
            found = self._checkpoint.slice(name, shape)
            if len(rows):
                piece = found[rows.start : rows.stop] if columns is None else found[rows.start : rows.stop, columns.start : columns.stop]
                into[at : at + len(rows)].copy_(piece)
            at += len(rows)


class _Arena:
    """One block for all weights. On a CPU it asks for huge pages: streaming weights through 4 KiB pages loses a
    fifth of the memory's bandwidth. New memory reads as zero."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._at = 0
        if device.type == "cpu":
            block = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self._block = torch.frombuffer(block, dtype=torch.uint8)
            self._at = -self._block.data_ptr() % _HUGE_PAGE_BYTES
        else:
            self._block = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        piece = self._block[self._at : self._at + nbytes].view(dtype).view(shape)
        self._at += _aligned(nbytes)
        return piece


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _times(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)


def _total_bytes(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> int:
    """Bytes that ``load_weights`` takes from the arena."""
    hidden, size, inner = config.hidden, config.head_dim, len(shard.inner)
    q, kv = len(shard.heads) * size, len(shard.kv_heads) * size

    def pieces() -> Iterator[int]:
        yield from (shard.vocab_rows * hidden for _ in range(1 if config.tied else 2))
        yield hidden
        for _ in range(config.layers):
            yield from (hidden, (q + 2 * kv) * hidden, hidden * q, hidden, 2 * inner * hidden, hidden * inner)
            yield from (q + 2 * kv,) if config.qkv_bias else ()
            yield from (size, size) if config.qk_norm else ()
            yield from (hidden,) if config.o_bias else ()
            yield from (2 * inner, hidden) if config.mlp_bias else ()

    return sum(_aligned(piece * dtype.itemsize) for piece in pieces())
