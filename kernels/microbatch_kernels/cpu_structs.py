"""The structs that the C kernels are called with, field by field as in ``csrc/kernels.h`` and ``csrc/layer.c``."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

_POINTER: Final = ctypes.c_void_p
_SIZE: Final = ctypes.c_int64


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor begins; null for none."""
    return None if tensor is None else tensor.data_ptr()


class Weight(ctypes.Structure):
    """``struct weight``."""

    _fields_ = [(name, _POINTER) for name in ("packed", "scales", "bias")]


class Linear(ctypes.Structure):
    """``struct linear``."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "y")),
        *((name, Weight) for name in ("weight", "gate")),
        *((name, _SIZE) for name in ("rows", "k", "n", "kind")),
    ]


class Attention(ctypes.Structure):
    """``struct attention``."""

    _fields_ = [
        *((name, _POINTER) for name in ("query", "keys", "values", "key_scales", "value_scales", "sinks", "out")),
        *((name, _POINTER) for name in ("block_tables", "starts", "context_lens")),
        *((name, _SIZE) for name in ("sequences", "table_width", "block_size", "heads", "kv_heads")),
        *((name, _SIZE) for name in ("key_dim", "value_dim", "query_stride", "query_head_stride", "window", "kind")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Write(ctypes.Structure):
    """``struct write``."""

    _fields_ = [
        *((name, _POINTER) for name in ("pool", "scales", "states", "slots")),
        *((name, _SIZE) for name in ("tokens", "heads", "dim", "stride", "kind")),
    ]


class Norm(ctypes.Structure):
    """``struct norm``."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "more", "weight", "y")),
        *((name, _SIZE) for name in ("rows", "dim")),
        ("eps", ctypes.c_float),
    ]


class Rotate(ctypes.Structure):
    """``struct rotate``."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "cosines", "sines")),
        *((name, _SIZE) for name in ("rows", "stride", "heads", "dim")),
    ]


class Layer(ctypes.Structure):
    """``struct layer``."""

    _fields_ = [
        *((name, Norm) for name in ("before", "between", "after")),
        *((name, Linear) for name in ("qkv", "out", "inner", "down")),
        ("rotate", Rotate),
        *((name, Write) for name in ("keys", "values")),
        ("attention", Attention),
    ]
