"""The pool of keys and values, in pages. Who owns which page is the business of ``engine/cache``."""

from __future__ import annotations

import mmap

import torch


class KVPool:
    """Keys and values of every layer: ``keys[layer]`` and ``values[layer]`` are [slots, kv_heads_local, head_dim].

    Slot ``page * page_size + offset`` holds one token. On a CPU memory is taken from the system when a page is first
    written. The layers lie ``layer_bytes`` apart.
    """

    def __init__(self, layers: int, pages: int, page_size: int, kv_heads_local: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:  # fmt: skip
        if min(layers, pages, page_size, kv_heads_local, head_dim) < 1:
            raise ValueError(
                f"KV pool: {layers} layers x {pages} pages x {page_size} tokens x {kv_heads_local} heads x {head_dim}: a size is below 1"
            )
        self.layers = layers
        self.pages = pages
        self.page_size = page_size
        self.kv_heads_local = kv_heads_local
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (layers, pages * page_size, kv_heads_local, head_dim)
        self.layer_bytes = shape[1] * shape[2] * shape[3] * dtype.itemsize
        self._keys, self._values = (_zeros(shape, self.layer_bytes * layers, dtype, torch.device(device)) for _ in range(2))
        self.keys: tuple[torch.Tensor, ...] = tuple(self._keys.unbind(0))
        self.values: tuple[torch.Tensor, ...] = tuple(self._values.unbind(0))

    @staticmethod
    def bytes_per_page(layers: int, page_size: int, kv_heads_local: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes on one rank, keys and values of all layers."""
        return 2 * layers * page_size * kv_heads_local * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], size_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.zeros`` writes every byte, which takes a second for 400 MB and makes all of it resident."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
