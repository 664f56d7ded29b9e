"""Attention backends against the naive one, and the naive one against a dense formula; odd shapes on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore, LayerSpec, zeros

CPU = torch.device("cpu")
BATCHES = {
    "decode": ([1, 1, 1], [1, 17, 63]),
    "prefill": ([5, 31, 1], [5, 31, 1]),
    "chunks": ([3, 16, 1, 7], [20, 16, 33, 40]),
    "alone": ([1], [129]),
}


def error_ratio(x: torch.Tensor, y: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``x``."""
    return ((x - y).square().mean().sqrt() / (x.square().mean().sqrt() + 1e-8)).item()


def paged_batch(
    query_lens: list[int],
    context_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, KVStore, AttentionInputs, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Random K/V of each sequence, scattered over blocks in a random order; also returned densely."""
    torch.manual_seed(0)
    block_size = 16
    counts = [-(-c // block_size) for c in context_lens]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    store = KVStore([LayerSpec(kv_heads, dim, dim, dtype, CPU)], sum(counts), block_size)
    dense = []
    for table, context in zip(tables, context_lens, strict=True):
        keys, values = (torch.randn(context, kv_heads, dim).to(dtype) for _ in range(2))
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(context)])
        store.kv[0].write(keys, values, slots)
        dense.append((keys, values))
    rows = [(table, c - n, n) for table, c, n in zip(tables, context_lens, query_lens, strict=True)]
    query = torch.randn(sum(query_lens), heads, dim).to(dtype)
    return query, store, AttentionInputs.build(rows, block_size, CPU), dense


@pytest.mark.parametrize("name", ["naive", "torch", "cpu"])
@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 60), (8, 1, 80)])
@pytest.mark.parametrize("window", [None, 7, 16])
def test_backend_equals_naive(
    name: str, batch: str, heads: int, kv_heads: int, dim: int, window: int | None, kernel_folder: Path
) -> None:
    query, store, inputs, _ = paged_batch(*BATCHES[batch], heads, kv_heads, dim)
    options = AttentionOptions(dim**-0.5, sliding_window=window)
    backend = choose_backend(name, folder=kernel_folder)
    assert backend.name == name
    expected = attention_naive(query, store.kv[0], inputs, options)
    assert error_ratio(expected, backend(query, store.kv[0], inputs, options)) < 1e-5


@pytest.mark.parametrize("name", ["naive", "torch", "cpu"])
@pytest.mark.parametrize("batch", sorted(BATCHES))
def test_softcap_and_sinks(name: str, batch: str, kernel_folder: Path) -> None:
    query, store, inputs, _ = paged_batch(*BATCHES[batch], 6, 2, 64)
    options = AttentionOptions(0.3, 9, softcap=2.0, sinks=torch.linspace(-1, 1, 6))
    expected = attention_naive(query, store.kv[0], inputs, options)
    plain = attention_naive(query, store.kv[0], inputs, AttentionOptions(0.3, 9))
    assert error_ratio(expected, plain) > 0.01
    backend = choose_backend(name, folder=kernel_folder)
    assert error_ratio(expected, backend(query, store.kv[0], inputs, options)) < 1e-5


def test_naive_equals_the_dense_formula() -> None:
    query_lens, context_lens = BATCHES["chunks"]
    query, store, inputs, dense = paged_batch(query_lens, context_lens, 6, 3, 32)
    got = attention_naive(query, store.kv[0], inputs, AttentionOptions(0.2))
    start = 0
    for new, context, (keys, values) in zip(query_lens, context_lens, dense, strict=True):
        for i in range(new):
            for head in range(6):
                seen = context - new + i + 1
                scores = (keys[:seen, head // 2] @ query[start + i, head]) * 0.2
                torch.testing.assert_close(got[start + i, head], scores.softmax(0) @ values[:seen, head // 2])
        start += new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", sorted(BATCHES))
def test_half_precision_stays_finite_and_close(dtype: torch.dtype, batch: str) -> None:
    query, store, inputs, _ = paged_batch(*BATCHES[batch], 9, 3, 64, dtype)
    options = AttentionOptions(0.125)
    expected = attention_naive(query, store.kv[0], inputs, options)
    got = choose_backend("torch")(query, store.kv[0], inputs, options)
    assert got.dtype is dtype and torch.isfinite(got).all()
    assert error_ratio(expected.float(), got.float()) < 2e-2


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_stray_blocks_and_slots_never_show(name: str, kernel_folder: Path) -> None:
    """Whatever lies in other blocks, behind the end of the context or in the null block changes nothing."""
    query, store, inputs, _ = paged_batch([1, 4], [21, 9], 4, 2, 32)
    options = AttentionOptions(0.2)
    backend = choose_backend(name, folder=kernel_folder)
    before = backend(query, store.kv[0], inputs, options)
    used = {
        t * 16 + o
        for row, c in zip(inputs.block_tables.tolist(), (21, 9), strict=True)
        for p in range(c)
        for t, o in [(row[p // 16], p % 16)]
    }
    free = torch.tensor([s for s in range((store.num_blocks + 1) * 16) if s not in used])
    for pool in store.pools:
        pool.flatten(0, 1)[free] = 1e4
    assert torch.equal(before, backend(query, store.kv[0], inputs, options))


def test_an_unknown_backend_fails_loudly_and_auto_says_what_it_took(kernel_folder: Path) -> None:
    assert choose_backend("auto").name == "torch"
    assert choose_backend("auto", folder=kernel_folder).name == "cpu"
    assert choose_backend("auto", folder=kernel_folder, device=torch.device("cuda")).name == "torch"
    with pytest.raises(ValueError, match="known: auto, naive, torch, cpu"):
        choose_backend("flash")
    with pytest.raises(ValueError, match="'cpu' cannot be had"):
        choose_backend("cpu")


def test_store_sizes_and_copies() -> None:
    spec = LayerSpec(3, 64, 32, torch.float16, CPU)
    store = KVStore([spec, spec], num_blocks=5, block_size=8)
    assert store.bytes_per_token == 2 * 3 * (64 + 32) * 2 and store.bytes_per_block == 8 * store.bytes_per_token
    assert store.kv[0].keys.shape == (6, 8, 3, 64) and store.kv[1].values.shape == (6, 8, 3, 32)
    store.kv[1].keys[2] = 1.0
    store.copy_blocks([(2, 4), (4, 5)])
    assert store.kv[1].keys[5].eq(1).all() and store.kv[1].keys[3].eq(0).all()
    assert repr(store) == "<KVStore 2 layers, 5 blocks of 8, 0 MiB>"


def test_zeros_on_the_cpu_are_zero_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        made = zeros((3, 5), dtype, CPU)
        assert made.dtype is dtype and made.shape == (3, 5) and made.eq(0).all()
    assert zeros((2,), torch.float32, torch.device("meta")).device.type == "meta"
