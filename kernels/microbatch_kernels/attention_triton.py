"""Paged attention in Triton: decodes split over their context, longer rows in tiles, at most three launches a layer.

Importing this module imports triton. ``TRITON_INTERPRET=1``, set before that, runs the kernels on the CPU, for tests.
"""

from __future__ import annotations

from typing import Final

import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.quantized_kv import quantize, raw
from microbatch_kernels.triton_decode import decode_attention
from microbatch_kernels.triton_launch import INTERPRETED, Scales
from microbatch_kernels.triton_prefill import prefill_attention
from microbatch_kernels.triton_write import write_slots

#: Of older GPUs Triton does not use the units for products of matrices.
_LEAST_CAPABILITY: Final = (8, 0)


def attention_triton(
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of packed queries over their paged context; arguments as in ``attention_naive``."""
    out = query.new_empty(*query.shape[:2], kv.values.shape[-1])
    scales = None
    if kv.key_scales is not None and kv.value_scales is not None:
        scales = Scales(kv.key_scales, kv.value_scales)
    decode_attention(out, query, kv, inputs, options, scales=scales)
    if not inputs.is_decode:
        prefill_attention(out, query, kv, inputs, options, scales=scales)
    return out


def write_triton(kv: LayerKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """``LayerKV.write`` in one launch, of K/V in 8 bits in two. A token whose slot is negative is padding and is not
    stored."""
    if kv.key_scales is not None and kv.value_scales is not None:
        keys, key_scales = quantize(keys, kv.keys.dtype)
        values, value_scales = quantize(values, kv.values.dtype)
        pools = kv.key_scales[..., None], kv.value_scales[..., None]
        write_slots(pools[0], pools[1], key_scales[..., None], value_scales[..., None], slots)
    write_slots(raw(kv.keys), raw(kv.values), raw(keys), raw(values), slots)


def problem(device: torch.device) -> str | None:
    """Why the kernels cannot serve K/V on ``device``, or None. On a GPU one is tried, as much can be missing there: a
    driver that fits, a C compiler."""
    if device.type != "cuda":
        return None if INTERPRETED else f"it needs a CUDA device, and K/V is on {device}"
    if INTERPRETED:
        return "TRITON_INTERPRET is set, which runs kernels on the CPU"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _LEAST_CAPABILITY:
        return f"it needs an NVIDIA GPU of compute capability 8.0, {torch.cuda.get_device_name(device)} is none"
    try:
        _try_out(device)
    except Exception as error:  # whatever a broken installation raises
        return f"a first kernel failed with {type(error).__name__}: {error}"
    return None


def _try_out(device: torch.device) -> None:
    pools = torch.zeros(2, 1, 1, 1, 16, device=device)
    ones = torch.ones(1, 1, 16, device=device)
    write_slots(pools[0], pools[1], ones, ones, torch.zeros(1, dtype=torch.int64, device=device))
    if not pools.eq(1).all():
        raise RuntimeError("it wrote nothing")
