"""Paged attention in C for a CPU, over pools of float32 or 8 bits: see ``csrc/attention.c``."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Final

import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.cpu_structs import Attention, Write, pointer
from microbatch_kernels.layer_kv import LayerKV

#: The kinds of ``csrc/attention.c``, by the dtype of the pools.
_KINDS: Final = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


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
        if not self.fits(query, kv):
            return attention_torch(query, kv, inputs, options)
        query = query if query.stride(-1) == 1 else query.contiguous()
        options = options if options.sinks is None else replace(options, sinks=options.sinks.float().contiguous())
        out = query.new_empty(query.shape[0], query.shape[1], kv.values.shape[3])
        call = self.attention_call(query, kv, inputs, options, out)
        if self._attend(ctypes.byref(call)):
            raise torch.OutOfMemoryError("no memory for the work list of attention")
        return out

    def attention_call(
        self, query: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, options: AttentionOptions, out: torch.Tensor
    ) -> Attention:
        """What the kernel is called with, to write ``out`` ``[T, H, value_dim]``. The tensors must outlive the call."""
        return Attention(
            *(pointer(t) for t in (query, kv.keys, kv.values, kv.key_scales, kv.value_scales, options.sinks, out)),
            *(t.data_ptr() for t in (inputs.block_tables, inputs.query_starts, inputs.lens)),
            *(len(inputs.query_lens), inputs.block_tables.stride(0), kv.block_size, query.shape[1], kv.num_kv_heads),
            *(kv.keys.shape[3], kv.values.shape[3], query.stride(0), query.stride(1)),
            *(options.sliding_window or 0, _KINDS[kv.keys.dtype]),
            *(options.scale, options.softcap or 0.0),
        )

    def write(self, kv: LayerKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K/V of T tokens, as ``LayerKV.write``."""
        if not (_readable(kv) and _in_rows(keys, kv.keys, slots) and _in_rows(values, kv.values, slots)):
            kv.write(keys, values, slots)  # which also says what is wrong with shapes that do not fit
            return
        for call in self.write_calls(kv, keys, values, slots):
            self._write(ctypes.byref(call))

    def write_calls(self, kv: LayerKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> list[Write]:
        """What the kernel is called with for keys and for values, whose rows must lie whole."""
        return [
            Write(
                *(pointer(t) for t in (pool, scales, states, slots)),
                *(*states.shape, states.stride(0), _KINDS[pool.dtype]),
            )
            for pool, scales, states in ((kv.keys, kv.key_scales, keys), (kv.values, kv.value_scales, values))
        ]

    def fits(self, query: torch.Tensor, kv: LayerKV) -> bool:
        """Whether the kernel can do it; torch operators do the rest."""
        return (
            _readable(kv)
            and query.dtype == torch.float32
            and max(kv.keys.shape[3], kv.values.shape[3]) <= self._max_dim
            and query.shape[1] // kv.num_kv_heads <= self._max_group
        )


def _readable(kv: LayerKV) -> bool:
    """Whether the pool is in the memory of the CPU and of a format that the kernels know."""
    return kv.keys.dtype in _KINDS and kv.keys.device.type == "cpu"


def _in_rows(states: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether ``states`` ``[T, heads, dim]`` are float32, lie as whole rows and are what ``pool`` keeps of a token."""
    whole = states.dtype == torch.float32 and states.stride(2) == 1 and states.stride(1) == states.shape[2]
    return whole and states.shape == (len(slots), *pool.shape[2:])
