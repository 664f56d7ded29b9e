"""K/V in 8 bits: how far a number is from what was written, what NaN and zeros do, bytes, copies and scrubbing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.quantized_kv import STORAGE_DTYPES, dequantize, quantize, storage_dtype
from microbatch_kernels.store import KVStore, LayerSpec

CPU = torch.device("cpu")
NAMES = ("fp8", "int8")
DIMS = (1, 7, 60, 64, 80, 129)
NAN, INF = float("nan"), float("inf")


def stored(name: str) -> torch.dtype:
    dtype = storage_dtype(name)
    assert dtype is not None
    return dtype


def spec(name: str, dim: int = 64, dtype: torch.dtype = torch.float32) -> LayerSpec:
    return LayerSpec(3, dim, dim + 1, dtype, CPU).stored_as(name)


def pattern(pool: torch.Tensor) -> torch.Tensor:
    """A copy to the bit: NaN equals itself there."""
    return pool.contiguous().view(torch.uint8).clone()


def furthest(name: str, exact: torch.Tensor) -> torch.Tensor:
    """The largest error that the format allows for each number ``[..., dim]``, from its definition: half a step of
    int8, half a unit of the 3 bits behind the point of fp8 and half its smallest number."""
    largest = exact.abs().amax(-1, keepdim=True)
    if name == "int8":
        return largest / 127 / 2
    return torch.maximum(exact.abs() * 2.0**-4, largest / 448 * 2.0**-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_a_number_comes_back_within_half_a_step(name: str, dim: int, size: float) -> None:
    torch.manual_seed(dim)
    exact = torch.randn(40, 3, dim) * torch.logspace(-3, 3, 40)[:, None, None] * size
    numbers, scales = quantize(exact, stored(name))
    assert (numbers.dtype, numbers.shape, scales.shape) == (stored(name), exact.shape, exact.shape[:-1])
    error = (dequantize(numbers, scales, torch.float32) - exact).abs()
    assert (error <= furthest(name, exact) * (1 + 1e-4)).all()
    assert dim == 1 or error.max() > 0, "8 bits cannot be exact: nothing was rounded"


@pytest.mark.parametrize("name", NAMES)
@given(head=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=9))
def test_any_finite_head_comes_back_finite_and_near(name: str, head: list[float]) -> None:
    exact = torch.tensor(head)
    got = dequantize(*quantize(exact, stored(name)), torch.float32)
    # Below the smallest scale numbers are kept to a fixed step, so that none divides by zero.
    allowed = furthest(name, exact).clamp(min=torch.finfo(torch.float32).tiny / 2)
    assert ((got - exact).abs() <= allowed * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_whole_range_of_16_bits_stays_finite(name: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    exact = torch.tensor([[top, -top, 0.0], [top / 3, 1.0, -1.0], [torch.finfo(dtype).tiny, 0.0, 0.0]], dtype=dtype)
    got = dequantize(*quantize(exact, stored(name)), dtype)
    assert got.dtype is dtype and torch.isfinite(got).all()
    assert torch.equal(got[0], exact[0]) and torch.equal(got[2], exact[2])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_zeros_and_unwritten_slots_too(name: str) -> None:
    numbers, scales = quantize(torch.zeros(2, 3, 5), stored(name))
    assert torch.isfinite(scales).all() and scales.gt(0).all()
    assert dequantize(numbers, scales, torch.float32).eq(0).all()
    kv = KVStore([spec(name)], 4, 4).kv[0]
    assert all(states.eq(0).all() for states in kv.gather(torch.arange(5)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_no_number_shows_in_its_head_alone_and_is_scrubbed(name: str, bad: float) -> None:
    torch.manual_seed(0)
    store = KVStore([spec(name)], 4, 4)
    kv, slots = store.kv[0], torch.arange(4, 12)
    keys, values = torch.randn(8, 3, 64), torch.randn(8, 3, 65)
    keys[2, 1, 5] = values[6, 0, 64] = bad
    kv.write(keys, values, slots)
    got_keys, got_values = kv.gather_slots(slots)
    assert got_keys[2, 1].isnan().all() and got_values[6, 0].isnan().all()
    assert got_keys.isnan().sum() == 64 and got_values.isnan().sum() == 65
    before = [pattern(pool) for pool in kv.gather_slots(slots)]
    store.scrub([1, 2])
    after = kv.gather_slots(slots)
    assert all(torch.isfinite(pool.float()).all() for pool in store.pools)
    assert after[0][2, 1].eq(0).all() and after[1][6, 0].eq(0).all()
    for old, new, broken in zip(before, map(pattern, after), (got_keys, got_values), strict=True):
        whole = ~broken.isnan().any(-1)
        assert torch.equal(old[whole], new[whole]), "whole numbers must stay as they are to the bit"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", DIMS)
def test_what_is_stored_of_a_token_does_not_depend_on_its_neighbours(name: str, dim: int) -> None:
    torch.manual_seed(1)
    keys, values = torch.randn(33, 3, dim), torch.randn(33, 3, dim + 1)
    keys[4] *= 1e4
    values[5] = NAN
    slots = torch.randperm(36)[:33] + 4
    together, alone = KVStore([spec(name, dim)], 9, 4), KVStore([spec(name, dim)], 9, 4)
    together.kv[0].write(keys, values, slots)
    for i in torch.randperm(33).tolist():
        alone.kv[0].write(keys[i : i + 1], values[i : i + 1], slots[i : i + 1])
    for one, two in zip(together.pools, alone.pools, strict=True):
        assert torch.equal(pattern(one), pattern(two))
    assert pattern(together.pools[0]).any(), "something is stored"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reading_by_block_and_by_slot_give_what_was_written(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    kv = KVStore([spec(name, 20, dtype)], 6, 4).kv[0]
    keys, values = torch.randn(8, 3, 20).to(dtype), torch.randn(8, 3, 21).to(dtype)
    kv.write(keys, values, torch.tensor([16, 17, 18, 19, 8, 9, 10, 11]))
    by_slot = kv.gather_slots(torch.tensor([[16, 17, 18, 19], [8, 9, 10, 11]]))
    by_block = kv.gather(torch.tensor([[4], [2]]))
    end_to_end = kv.gather(torch.tensor([4, 2]))
    for exact, slotted, blocked, flat in zip((keys, values), by_slot, by_block, end_to_end, strict=True):
        right = dequantize(*quantize(exact, stored(name)), dtype)
        assert slotted.dtype is blocked.dtype is flat.dtype is dtype
        assert torch.equal(slotted.flatten(0, 1), right) and torch.equal(flat, right)
        assert torch.equal(blocked.flatten(0, 1), right)


def test_bytes_are_those_of_the_pools() -> None:
    for name in STORAGE_DTYPES:
        store = KVStore([spec(name), spec(name, 7)], num_blocks=5, block_size=8)
        assert sum(pool.nbytes for pool in store.pools) == 6 * store.bytes_per_block
    plain, small = spec("auto").bytes_per_token, spec("int8").bytes_per_token
    assert (plain, small) == (3 * (64 + 65) * 4, 3 * (64 + 65 + 2 * 4))
    assert spec("fp8").bytes_per_token == small


@pytest.mark.parametrize("name", NAMES)
def test_copies_take_the_scales_along(name: str) -> None:
    torch.manual_seed(3)
    store = KVStore([spec(name), spec(name, 8)], 5, 4)
    for kv in store.kv:
        dim = kv.keys.shape[-1]
        kv.write(torch.randn(4, 3, dim), torch.randn(4, 3, dim + 1), torch.arange(8, 12))
    store.copy_blocks([(2, 4), (4, 5)])
    for kv in store.kv:
        for states in kv.gather(torch.tensor([[2], [5], [3]])):
            assert torch.equal(states[0], states[1]) and states[0].ne(0).any() and states[2].eq(0).all()
    assert len(store.pools) == 8


@pytest.mark.parametrize("backend", ["naive", "torch", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_backends_attend_over_the_rounded_numbers(backend: str, name: str, kernel_folder: Path) -> None:
    """As over a plain store that holds the rounded numbers: decodes, chunks and whole prompts."""
    torch.manual_seed(4)
    rounded, plain = KVStore([spec(name, 20)], 12, 4), KVStore([spec("auto", 20)], 12, 4)
    keys, values, slots = torch.randn(48, 3, 20), torch.randn(48, 3, 21), torch.arange(4, 52)
    rounded.kv[0].write(keys, values, slots)
    plain.kv[0].write(*rounded.kv[0].gather_slots(slots), slots)
    for rows in ([([3, 1], 6, 1), ([5, 9, 2], 11, 1)], [([3, 1], 2, 5), ([5, 9, 2], 0, 12), ([7], 3, 1)]):
        inputs = AttentionInputs.build(rows, 4, CPU)
        query = torch.randn(len(inputs.slot_mapping), 6, 20)
        options = AttentionOptions(0.2, 7)
        expected = choose_backend("naive")(query, plain.kv[0], inputs, options)
        got = choose_backend(backend, folder=kernel_folder)(query, rounded.kv[0], inputs, options)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_c_kernel_rounds_to_the_same_bits(name: str, dim: int, kernel_folder: Path) -> None:
    torch.manual_seed(dim)
    ours, theirs = (KVStore([spec(name, dim)], 12, 4).kv[0] for _ in range(2))
    keys = torch.randn(20, 3, dim) * torch.logspace(-7, 4, 20)[:, None, None]
    values = torch.randn(20, 3, dim + 1)
    keys[3], keys[5, 1, 0], values[6, 0, 0] = 0, NAN, INF
    slots = torch.randperm(48)[:20]
    choose_backend("cpu", folder=kernel_folder).write(ours, keys, values, slots)
    theirs.write(keys, values, slots)
    for got, expected in zip(ours.pools, theirs.pools, strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown K/V format 'int4'; known: auto, fp8, int8"):
        spec("int4")
    assert spec("auto") == LayerSpec(3, 64, 65, torch.float32, CPU)
