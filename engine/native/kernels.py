"""Signatures and structures of kernels.c."""

from __future__ import annotations

import ctypes

from engine.native.build import library

WEIGHT_NAMES = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "gate_up_bias", "down", "down_bias",
)  # fmt: skip


class LayerStruct(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in WEIGHT_NAMES), ("window", ctypes.c_int64))


class ModelStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("rope", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner", "is_bf16", "panels", "unused")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "table_width", "page_size")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "tables", "starts", "kv_lens", "keys", "values")),
        ("layer_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "delta", "normed", "qkv", "attended", "gate_up", "act")),
        ("has_delta", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def load() -> ctypes.CDLL | None:
    """The library with its signatures set. Import torch first: both then share one OpenMP."""
    found = library("kernels")
    if found is None:
        return None
    model, step, number, data = ctypes.POINTER(ModelStruct), ctypes.POINTER(StepStruct), ctypes.c_int32, ctypes.c_void_p
    found.lastbatch_layers.argtypes = (model, step, number, number)
    found.lastbatch_attention_half.argtypes = (model, step, number)
    found.lastbatch_mlp_half.argtypes = (model, step, number)
    found.lastbatch_norm.argtypes = (model, step, data)
    found.lastbatch_attention.argtypes = (model, step, number)
    found.lastbatch_silu_mul.argtypes = (model, step)
    found.lastbatch_head.argtypes = (model, number, data, number, number, data, number, data)
    found.lastbatch_pack.argtypes = (data, number, number, data)
    found.lastbatch_has_panels.restype = number
    for name in ("layers", "attention_half", "mlp_half", "norm", "attention", "silu_mul", "head", "pack"):
        getattr(found, f"lastbatch_{name}").restype = None
    return found
