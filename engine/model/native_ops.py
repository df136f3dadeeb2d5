"""How the layers of a decoder run on a CPU, with the kernels of engine/native/kernels.c.

Steps of few tokens run whole layers in C (with several ranks: half layers, between collectives). Where C is the faster
for any number of tokens (bf16 in panels, AVX-512 BF16 and no AMX) so do all steps. Elsewhere larger steps take their
matrix products from torch, in bf16 from weights that were laid out for oneDNN once, and the rest from C.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.exec.batch import ForwardBatch
from engine.exec.kv import KVPool
from engine.model.hf_config import ModelConfig
from engine.model.layers import add_norm
from engine.model.loader import LayerWeights, Weights
from engine.model.rope import rope_table
from engine.model.shard import Shard
from engine.native import build
from engine.native.kernels import WEIGHT_NAMES, LayerStruct, ModelStruct, StepStruct
from engine.parallel.group import Group

_PACK_ROWS_HINT = 32
_FEW_ROWS = 2  # up to this many tokens a product by rows is faster than torch's
_FEW_ROWS_AMX = 3  # and one by panels than oneDNN's with AMX
_SPAN_TOKENS = 64  # steps of more tokens say at each layer how far they are
_MATRICES = ("qkv", "o", "gate_up", "down")


class NativeOps:
    """For f32 and bf16. Not for several threads at once: buffers are kept between steps."""

    def __init__(self, library: ctypes.CDLL, config: ModelConfig, shard: Shard, weights: Weights, group: Group) -> None:
        self._library = library
        self._config = config
        self._weights = weights
        self._group = group
        self._dtype = weights.embed.dtype
        self._widths = _widths(config, shard)
        self._table = rope_table(config.rope, config.head_dim, config.context)
        self._layers = (LayerStruct * config.layers)(*(_layer(w, window) for w, window in zip(weights.layers, config.windows, strict=True)))
        self._model = ModelStruct(
            ctypes.addressof(self._layers), self._table.data_ptr(), config.hidden, len(shard.heads), len(shard.kv_heads), config.head_dim,
            len(shard.inner), self._dtype is torch.bfloat16, 0, 0, config.rms_eps, 1 / math.sqrt(config.head_dim),
        )  # fmt: skip
        self._head = weights.head
        self._packed: list[dict[str, torch.Tensor]] | None = None
        self._few = _FEW_ROWS
        if self._dtype is torch.bfloat16:
            self._lay_out()
        self._scratch: dict[str, torch.Tensor] = {}

    def _lay_out(self) -> None:
        """Lay bf16 matrices out for the products: in panels, in place, for the C kernels; and a copy for oneDNN where it
        is faster on larger steps (with AMX) or where the machine or the shapes do not suit panels.

        A tied head gets a copy of its own, because the embedding reads the original.
        """
        matrices = [getattr(layer, name) for layer in self._weights.layers for name in _MATRICES]
        shapes = [matrix.shape for matrix in (*matrices, self._head)]
        panels = bool(self._library.lastbatch_has_panels()) and not any(shape[0] % 16 or shape[1] % 2 for shape in shapes)
        amx = build.cpu_has("amx_bf16")
        if (amx or not panels) and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._packed = _pack(self._weights)
        if not panels:
            return
        if self._head is self._weights.embed:
            self._head = torch.empty_like(self._head)
        for matrix, into in (*((matrix, matrix) for matrix in matrices), (self._weights.head, self._head)):
            self._library.lastbatch_pack(matrix.data_ptr(), *matrix.shape, into.data_ptr())
        self._model.panels = 1
        self._few = _FEW_ROWS_AMX if self._packed is not None else sys.maxsize

    def run_layers(self, hidden: torch.Tensor, batch: ForwardBatch, kv: KVPool, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        tokens = len(batch.tokens)
        starts = torch.tensor([0, *itertools.accumulate(batch.query_lens)], dtype=torch.int32)
        lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
        tables = batch.page_tables.contiguous()
        buffers = {name: self._buffer(name, tokens) for name in self._widths}
        step = StepStruct(
            tokens, len(batch.query_lens), tables.shape[1], batch.page_size, batch.positions.data_ptr(), batch.slots.data_ptr(),
            tables.data_ptr(), starts.data_ptr(), lengths.data_ptr(), kv.keys[0].data_ptr(), kv.values[0].data_ptr(), kv.layer_bytes,
            hidden.data_ptr(), *(buffer.data_ptr() for buffer in buffers.values()), 0, 0,
        )  # fmt: skip
        if tokens <= self._few:
            return self._run_few(step, buffers["delta"], on_layer)
        return self._run_many(step, buffers, on_layer)

    def _run_few(self, step: StepStruct, delta: torch.Tensor, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        count, model, at = self._config.layers, ctypes.byref(self._model), ctypes.byref(step)
        if self._group.world == 1:
            span = count if step.tokens <= _SPAN_TOKENS else 1
            for layer in range(0, count, span):
                if on_layer is not None:
                    on_layer(layer)
                self._library.lastbatch_layers(model, at, layer, layer + span)
                step.has_delta = 1
            return delta
        for layer in range(count):
            if on_layer is not None:
                on_layer(layer)
            self._library.lastbatch_attention_half(model, at, layer)
            self._group.all_reduce(delta)
            self._library.lastbatch_mlp_half(model, at, layer)
            self._group.all_reduce(delta)
            step.has_delta = 1
        return delta

    def _run_many(self, step: StepStruct, buffers: dict[str, torch.Tensor], on_layer: Callable[[int], None] | None) -> torch.Tensor:
        model, at, library = ctypes.byref(self._model), ctypes.byref(step), self._library
        delta = buffers["delta"]
        for index, layer in enumerate(self._weights.layers):
            if on_layer is not None:
                on_layer(index)
            library.lastbatch_norm(model, at, layer.input_norm.data_ptr())
            qkv = self._linear(buffers["normed"], index, "qkv")
            step.qkv = qkv.data_ptr()
            library.lastbatch_attention(model, at, index)
            delta = self._linear(buffers["attended"], index, "o")
            self._group.all_reduce(delta)
            step.delta, step.has_delta = delta.data_ptr(), 1
            library.lastbatch_norm(model, at, layer.post_norm.data_ptr())
            gate_up = self._linear(buffers["normed"], index, "gate_up")
            step.gate_up = gate_up.data_ptr()
            library.lastbatch_silu_mul(model, at)
            delta = self._linear(buffers["act"], index, "down")
            self._group.all_reduce(delta)
            step.delta = delta.data_ptr()
        return delta

    def _linear(self, x: torch.Tensor, index: int, name: str) -> torch.Tensor:
        layer = self._weights.layers[index]
        bias = None if name == "o" and layer.o_bias is None else getattr(layer, f"{name}_bias")
        if self._packed is None:
            return F.linear(x, getattr(layer, name), bias)
        return _packed_linear(x, self._packed[index][name], bias)

    def _buffer(self, name: str, tokens: int) -> torch.Tensor:
        """[tokens, width], kept from step to step and grown when needed."""
        width = self._widths[name]
        held = self._scratch.get(name)
        if held is None or held.shape[0] < tokens:
            held = self._scratch[name] = torch.empty((tokens, width), dtype=self._dtype)
        return held[:tokens]

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return add_norm(residual, delta, weight, self._config.rms_eps)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        head = self._head
        if len(normed) > self._few:
            return (_packed_linear(normed, self._packed[-1]["head"], None) if self._packed else F.linear(normed, head)).float()
        logits = torch.empty((len(normed), len(head)), dtype=torch.float32)
        self._library.lastbatch_head(
            ctypes.byref(self._model),
            self._model.panels,
            normed.data_ptr(),
            len(normed),
            head.shape[1],
            head.data_ptr(),
            len(head),
            logits.data_ptr(),
        )
        return logits

    def paths(self) -> dict[str, str]:
        kernels = build.paths()["kernels"]
        many = "oneDNN, weights laid out once" if self._packed else "torch"
        few = f"{kernels}, {'panels' if self._model.panels else 'rows'}"
        linear = few if self._few == sys.maxsize else f"{few} up to {self._few} tokens, then {many}"
        return {"linear": linear, "attention": f"paged, {kernels}", "layers": kernels}


def _widths(config: ModelConfig, shard: Shard) -> dict[str, int]:
    """Columns of each buffer, in the order of StepStruct's fields."""
    heads, kv_heads, inner = len(shard.heads), len(shard.kv_heads), len(shard.inner)
    return {
        "delta": config.hidden,
        "normed": config.hidden,
        "qkv": (heads + 2 * kv_heads) * config.head_dim,
        "attended": heads * config.head_dim,
        "gate_up": 2 * inner,
        "act": inner,
    }


def _layer(weights: LayerWeights, window: int) -> LayerStruct:
    tensors = [getattr(weights, name) for name in WEIGHT_NAMES]
    return LayerStruct(*(None if tensor is None else tensor.data_ptr() for tensor in tensors), window)


def _pack(weights: Weights) -> list[dict[str, torch.Tensor]]:
    """Each layer's matrices, then the head, as oneDNN wants them: a second copy of the weights."""
    matrices = [{name: getattr(layer, name) for name in _MATRICES} for layer in weights.layers]
    return [{name: _reorder(matrix) for name, matrix in group.items()} for group in (*matrices, {"head": weights.head})]


def _reorder(matrix: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACK_ROWS_HINT)
    return found


def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return found
