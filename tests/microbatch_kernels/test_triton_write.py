"""K/V in their places, through the interpreter and on a GPU: bits are moved, nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.triton_write import write_slots
from tests.microbatch_kernels.triton_cases import DEVICES, device_named


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim"), [(3, 64, 64), (1, 80, 80), (2, 24, 16), (2, 16, 24), (1, 1, 1), (9, 256, 256)]
)
def test_write_equals_the_store(device: str, dtype: torch.dtype, heads: int, key_dim: int, value_dim: int) -> None:
    torch.manual_seed(0)
    place = device_named(device)
    shape = (4, 16, heads)
    old = [torch.randint(-99, 99, (*shape, dim)).to(dtype).to(place) for dim in (key_dim, value_dim)]
    keys, values = (torch.randint(-99, 99, (5, heads, dim)).to(dtype).to(place) for dim in (key_dim, value_dim))
    slots = torch.tensor([63, 16, 17, 40, 31], device=place)
    wanted, got = (LayerKV(old[0].clone(), old[1].clone()) for _ in range(2))
    wanted.write(keys, values, slots)
    write_slots(got.keys, got.values, keys, values, slots)
    assert torch.equal(got.keys, wanted.keys) and torch.equal(got.values, wanted.values)


@pytest.mark.parametrize("device", DEVICES)
def test_states_as_models_give_them(device: str) -> None:
    """Keys after rotary are ``[heads, T, dim]`` in memory, values often a part of one product of all three."""
    place = device_named(device)
    keys = torch.randn(2, 3, 32, device=place).transpose(0, 1)
    values = torch.randn(3, 6, 32, device=place)[:, 4:]
    backwards = torch.randn(3, 32, 2, device=place).transpose(1, 2)
    slots = torch.tensor([9, 4, 30], device=place)
    for first, second in ((keys, values), (values, backwards)):
        pools = torch.zeros(2, 4, 8, 2, 32, device=place)
        write_slots(pools[0], pools[1], first, second, slots)
        for pool, states in zip(pools, (first, second), strict=True):
            assert torch.equal(pool.flatten(0, 1)[slots], states)
            assert pool.count_nonzero() == states.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_not_stored(device: str) -> None:
    place = device_named(device)
    pools = torch.zeros(2, 3, 4, 1, 16, device=place)
    ones = torch.ones(3, 1, 16, device=place)
    write_slots(pools[0], pools[1], ones, ones, torch.tensor([-1, 5, -1], device=place))
    assert pools.sum() == 2 * 16 and pools[:, 1, 1].eq(1).all()
    write_slots(pools[0], pools[1], ones[:0], ones[:0], torch.tensor([], dtype=torch.int64, device=place))
    assert pools.sum() == 2 * 16


def test_what_does_not_fit_is_refused() -> None:
    pool, states, slots = torch.zeros(2, 4, 2, 16), torch.zeros(1, 2, 16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="float16"):
        write_slots(pool, pool, states.half(), states, slots)
    with pytest.raises(ValueError, match="do not fit pools"):
        write_slots(pool, pool, states[:, :1], states[:, :1], slots)
