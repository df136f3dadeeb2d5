"""From a Hugging Face folder to a model that runs: which code serves which ``architectures`` name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from engine.exec.batch import ForwardBatch
from engine.exec.device import Device
from engine.exec.kv import KVPool
from engine.model.decoder import Decoder
from engine.model.hf_config import ModelConfig, read_config
from engine.model.loader import load_weights
from engine.model.native_ops import NativeOps
from engine.model.ops import Ops, TorchOps
from engine.model.shard import Shard
from engine.native import kernels
from engine.parallel.group import Group

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Build = Callable[[ModelConfig, Shard, torch.device, torch.dtype, Path, Group], "Model"]


class Model(Protocol):
    """A model on one rank. ``config`` is of the whole model, ``shard`` what this rank holds of it."""

    config: ModelConfig
    shard: Shard

    def forward(self, batch: ForwardBatch, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Write the batch's KV and return f32 [R, vocab] logits; see Decoder.forward."""
        ...

    def paths(self) -> dict[str, str]:
        """Which implementations run, by concern, for /server_info."""
        ...


def load_model(folder: Path | str, *, dtype: str | torch.dtype = "auto", group: Group, device: torch.device | Device) -> Model:
    """Read a folder's configuration and this rank's part of the weights.

    Args:
        dtype: of weights and activations; ``auto`` is what the folder says.

    Raises:
        ModelConfigError: the folder is broken, or holds something that is not supported.
    """
    folder = Path(folder)
    config = read_config(folder)
    shard = Shard.of(config, group.rank, group.world)
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES[config.torch_dtype if dtype == "auto" else dtype]
    where = device.torch_device if isinstance(device, Device) else device
    return _BUILDERS[config.architecture](config, shard, where, found, folder, group)


def _decoder(config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype, folder: Path, group: Group) -> Model:
    weights = load_weights(folder, config, shard, dtype, device)
    library = kernels.load() if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) else None
    ops: Ops = NativeOps(library, config, shard, weights, group) if library else TorchOps(config, shard, weights, group)
    return Decoder(config, shard, weights, group, ops)


_BUILDERS: dict[str, Build] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _decoder,
    "Qwen2ForCausalLM": _decoder,
    "Qwen3ForCausalLM": _decoder,
}
