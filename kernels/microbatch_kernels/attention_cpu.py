"""Paged attention in C for a CPU, over pools of float32 or 8 bits: see ``csrc/attention.c``."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.metadata import cu_seqlens

_TENSORS: Final = (
    *("query", "keys", "values", "key_scales", "value_scales"),
    *("sinks", "out", "block_tables", "starts", "context_lens"),
)
_SIZES: Final = (
    *("sequences", "table_width", "block_size", "heads", "kv_heads", "key_dim", "value_dim"),
    *("query_stride", "query_head_stride", "window", "kind"),
)
#: The kinds of ``csrc/attention.c``, by the dtype of the pools.
_KINDS: Final = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


class _Attention(ctypes.Structure):
    """``struct attention``."""

    _fields_ = [(name, ctypes.c_void_p) for name in _TENSORS]
    _fields_ += [(name, ctypes.c_int64) for name in _SIZES]
    _fields_ += [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]


class _Write(ctypes.Structure):
    """``struct write``."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("pool", "scales", "states", "slots")]
    _fields_ += [(name, ctypes.c_int64) for name in ("tokens", "heads", "dim", "stride", "kind")]


class CpuAttention:
    """The backend over a built library. What it cannot do (other dtypes, very wide heads) goes to torch operators."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.microbatch_attention
        self._write = library.microbatch_write
        self._max_dim = library.microbatch_attention_max_dim()
        self._max_group = library.microbatch_attention_max_group()
        self._write.restype = None

    def __call__(
        self, query: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention of packed queries over their paged context; arguments as in ``attention_naive``."""
        if not self._fits(query, kv):
            return attention_torch(query, kv, inputs, options)
        query = query if query.stride(-1) == 1 else query.contiguous()
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        out = query.new_empty(query.shape[0], query.shape[1], kv.values.shape[3])
        starts, context_lens = self._lengths(inputs)
        arguments = _Attention(
            *(t.data_ptr() for t in (query, kv.keys, kv.values)),
            *(None if t is None else t.data_ptr() for t in (kv.key_scales, kv.value_scales, sinks)),
            *(t.data_ptr() for t in (out, inputs.block_tables, starts, context_lens)),
            len(inputs.query_lens),
            inputs.block_tables.shape[1],
            kv.block_size,
            query.shape[1],
            kv.num_kv_heads,
            kv.keys.shape[3],
            kv.values.shape[3],
            query.stride(0),
            query.stride(1),
            options.sliding_window or 0,
            _KINDS[kv.keys.dtype],
            options.scale,
            options.softcap or 0.0,
        )
        if self._attend(ctypes.byref(arguments)):
            raise torch.OutOfMemoryError("no memory for the work list of attention")
        return out

    def write(self, kv: LayerKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K/V of T tokens, as ``LayerKV.write``."""
        if not all(_readable(kv) and _in_rows(states) for states in (keys, values)):
            kv.write(keys, values, slots)
            return
        for pool, scales, states in ((kv.keys, kv.key_scales, keys), (kv.values, kv.value_scales, values)):
            tokens, heads, dim = states.shape
            arguments = _Write(
                pool.data_ptr(),
                None if scales is None else scales.data_ptr(),
                states.data_ptr(),
                slots.data_ptr(),
                *(tokens, heads, dim, states.stride(0), _KINDS[pool.dtype]),
            )
            self._write(ctypes.byref(arguments))

    def _fits(self, query: torch.Tensor, kv: LayerKV) -> bool:
        return (
            _readable(kv)
            and query.dtype == torch.float32
            and max(kv.keys.shape[3], kv.values.shape[3]) <= self._max_dim
            and query.shape[1] // kv.num_kv_heads <= self._max_group
        )

    @staticmethod
    def _lengths(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[B + 1]`` and ``[B]``: where each sequence's tokens begin, and the contexts."""
        if ("starts", 0, None) not in inputs.masks:
            inputs.masks["starts", 0, None] = torch.tensor(cu_seqlens(inputs.query_lens))
            inputs.masks["context_lens", 0, None] = torch.tensor(inputs.context_lens)
        return inputs.masks["starts", 0, None], inputs.masks["context_lens", 0, None]


def _readable(kv: LayerKV) -> bool:
    """Whether the pool is in the memory of the CPU and of a format that the kernels know."""
    return kv.keys.dtype in _KINDS and kv.keys.device.type == "cpu"


def _in_rows(states: torch.Tensor) -> bool:
    """Whether ``states`` ``[T, heads, dim]`` are float32 and lie as whole rows."""
    return states.dtype == torch.float32 and states.stride(2) == 1 and states.stride(1) == states.shape[2]
