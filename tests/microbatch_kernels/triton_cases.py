"""Batches for the Triton kernels: shapes that are odd on purpose, NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.triton_launch import INTERPRETED, Scales

#: Both places that the kernels run in, for ``parametrize``.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: Of the root mean square. The interpreter cuts numbers off where it makes bfloat16 of them.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2 if INTERPRETED else 5e-3}


@dataclass(frozen=True)
class Case:
    """A batch and how it attends. ``kept_as``: the format of K/V when it is kept in 8 bits with scales."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kept_as: torch.dtype | None = None


@dataclass(frozen=True)
class Batch:
    """What a kernel gets, and what it must give."""

    query: torch.Tensor
    kv: LayerKV
    scales: Scales | None
    inputs: AttentionInputs
    options: AttentionOptions
    expected: torch.Tensor

    def empty(self) -> torch.Tensor:
        """A place for the result, NaN where nothing gets written."""
        return torch.full_like(self.expected, float("nan"))

    def check(self, out: torch.Tensor) -> None:
        """The result is right in every row."""
        assert out.dtype is self.query.dtype and out.shape == self.expected.shape
        ratio = (
            out.float() - self.expected.float()
        ).square().mean().sqrt() / self.expected.float().square().mean().sqrt()
        assert ratio.item() < TOLERANCE[out.dtype]


def device_named(name: str) -> torch.device:
    """The device, or the test is skipped."""
    if name == "cpu" and not INTERPRETED:
        pytest.skip("kernels run on the CPU only with TRITON_INTERPRET=1")
    return torch.device(name)


def make_batch(case: Case, device: str) -> Batch:
    """Random K/V in blocks in a random order; every slot that belongs to nobody holds NaN."""
    place = device_named(device)
    torch.manual_seed(0)
    counts = [-(-context // case.block_size) for context in case.context_lens]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    spots = (sum(counts) + 1, case.block_size, case.kv_heads)
    keys, values = torch.randn(*spots, case.key_dim), torch.randn(*spots, case.value_dim)
    owned = torch.zeros(spots[:2], dtype=torch.bool)
    for table, context in zip(tables, case.context_lens, strict=True):
        for position in range(context):
            owned[table[position // case.block_size], position % case.block_size] = True
    kv, scales, exact = _keep(keys, values, owned, case)
    query = torch.randn(sum(case.query_lens), case.heads, case.key_dim).to(case.dtype)
    starts = [context - new for context, new in zip(case.context_lens, case.query_lens, strict=True)]
    rows = list(zip(tables, starts, case.query_lens, strict=True))
    sinks = torch.linspace(-1, 1, case.heads).to(case.dtype) if case.sinks else None
    options = AttentionOptions(0.2, case.window, case.softcap, sinks)
    inputs = AttentionInputs.build(rows, case.block_size, torch.device("cpu"))
    expected = attention_naive(query, exact, inputs, options)
    return Batch(
        query.to(place),
        LayerKV(kv.keys.to(place), kv.values.to(place)),
        scales and Scales(scales.keys.to(place), scales.values.to(place)),
        inputs.to(place),
        AttentionOptions(0.2, case.window, case.softcap, sinks if sinks is None else sinks.to(place)),
        expected.to(place),
    )


def _keep(
    keys: torch.Tensor, values: torch.Tensor, owned: torch.Tensor, case: Case
) -> tuple[LayerKV, Scales | None, LayerKV]:
    """The pools, their scales, and the numbers that they stand for."""
    if case.kept_as is None:
        pools = [states.masked_fill(~owned[..., None, None], float("nan")).to(case.dtype) for states in (keys, values)]
        return LayerKV(pools[0], pools[1]), None, LayerKV(pools[0], pools[1])
    kept, factors, exact = [], [], []
    for states in (keys, values):
        largest = 127 if case.kept_as is torch.int8 else 448
        scale = states.abs().amax(-1) / largest
        numbers = states / scale[..., None]
        pool = (numbers.round() if case.kept_as is torch.int8 else numbers).to(case.kept_as)
        kept.append(pool)
        exact.append(pool.float() * scale[..., None])
        factors.append(scale.masked_fill(~owned[..., None], float("nan")))
    return LayerKV(kept[0], kept[1]), Scales(*factors), LayerKV(exact[0], exact[1])
