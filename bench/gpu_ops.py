"""Single operations of ``bench.gpu``: each kernel on shapes of a model of 8 billion weights, against plain torch.

The attention layer is Llama 3's: 32 heads, 8 K/V heads of 128, bfloat16, blocks of 16 in a random order. A time is the
median of repetitions between two events of the device, with its cache emptied before each. GB/s counts every byte that
has to be read or written once; ``share`` is that over the bandwidth of a plain copy in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.report import median
from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.attention_triton import attention_triton, write_triton
from microbatch_kernels.layer_kv import LayerKV

BLOCK_SIZE = 16


class Shape(NamedTuple):
    """An attention layer."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16


class Batch(NamedTuple):
    """A step of one layer, as the executor would lay it out."""

    query: torch.Tensor
    kv: LayerKV
    inputs: AttentionInputs


class Stopwatch:
    """Times what runs on a device."""

    def __init__(self, device: torch.device, repeats: int = 20, flushed_bytes: int = 2**28) -> None:
        self._repeats = repeats
        self._on_gpu = device.type == "cuda"
        self._flushed = torch.zeros(flushed_bytes, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of ``run``, after two runs that do not count."""
        for _ in range(2):
            run()
        return median((self._once(run) for _ in range(self._repeats)), 9)

    def _once(self, run: Callable[[], object]) -> float:
        self._flushed.zero_()
        if not self._on_gpu:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def make_batch(device: torch.device, new: list[int], contexts: list[int], shape: Shape) -> Batch:
    """Random K/V for sequences of these context lengths, of which ``new`` tokens each are new."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    rows = [(table, context - n, n) for table, context, n in zip(tables, contexts, new, strict=True)]
    spots = (sum(counts) + 1, BLOCK_SIZE, shape.kv_heads, shape.dim)
    keys, values = (torch.randn(spots, dtype=shape.dtype, device=device) for _ in range(2))
    query = torch.randn(sum(new), shape.heads, shape.dim, dtype=shape.dtype, device=device)
    return Batch(query, LayerKV(keys, values), AttentionInputs.build(rows, BLOCK_SIZE, device))


def copy_bandwidth(watch: Stopwatch, device: torch.device, num_bytes: int = 2**30) -> float:
    """Bytes a second of a plain copy, read and written."""
    source = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / watch.seconds(lambda: target.copy_(source))


def measure_write(
    watch: Stopwatch, bandwidth: float, device: torch.device, tokens: int, shape: Shape
) -> dict[str, Any]:
    """K/V of so many new tokens into the pools."""
    batch = make_batch(device, [tokens], [tokens], shape)
    states = torch.randn(tokens, shape.kv_heads, shape.dim, dtype=shape.dtype, device=device)
    slots = batch.inputs.slot_mapping
    ours = watch.seconds(lambda: write_triton(batch.kv, states, states, slots))
    torchs = watch.seconds(lambda: batch.kv.write(states, states, slots))
    moved = 2 * 2 * states.numel() * states.itemsize
    return {"tokens": tokens, **_figures(ours, torchs, moved, bandwidth)}


def measure_decode(
    watch: Stopwatch, bandwidth: float, device: torch.device, rows: int, context: int, shape: Shape
) -> dict[str, Any]:
    """One new token in each of so many rows."""
    batch = make_batch(device, [1] * rows, [context] * rows, shape)
    read = 2 * rows * context * shape.kv_heads * shape.dim * batch.query.itemsize
    return {"rows": rows, "context": context, **_attention(watch, batch, read, bandwidth)}


def measure_prefill(
    watch: Stopwatch, bandwidth: float, device: torch.device, new: int, context: int, shape: Shape
) -> dict[str, Any]:
    """A chunk at the end of a context, alone. It is bound by arithmetic: operations of both products, unmasked ones."""
    batch = make_batch(device, [new], [context], shape)
    read = 2 * context * shape.kv_heads * shape.dim * batch.query.itemsize + 2 * batch.query.nbytes
    pairs = new * (context - new) + new * (new + 1) // 2
    found = _attention(watch, batch, read, bandwidth)
    found["tflops"] = round(4 * pairs * shape.heads * shape.dim / (found["us"] * 1e6), 3)
    return {"new": new, "context": context, **found}


def _attention(watch: Stopwatch, batch: Batch, num_bytes: int, bandwidth: float) -> dict[str, Any]:
    options = AttentionOptions(batch.query.shape[-1] ** -0.5)
    ours = watch.seconds(lambda: attention_triton(*batch, options))
    torchs = watch.seconds(lambda: attention_torch(*batch, options))
    return _figures(ours, torchs, num_bytes, bandwidth)


def _figures(ours: float, torchs: float, num_bytes: int, bandwidth: float) -> dict[str, Any]:
    rate = num_bytes / ours
    return {
        "us": round(ours * 1e6, 1),
        "torch_us": round(torchs * 1e6, 1),
        "times_torch": round(torchs / ours, 2),
        "gb_per_s": round(rate / 1e9, 1),
        "share": round(rate / bandwidth, 3),
    }
