"""Host memory: what goes out comes back as it was, and no block of it is held twice."""

from __future__ import annotations

import pytest
import torch

from microbatch_kernels.host_pool import HostPool
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.store import KVStore, LayerSpec
from microbatch_kernels.swap_space import SwapSpace

CPU = torch.device("cpu")


def test_blocks_go_out_and_come_back() -> None:
    space = SwapSpace(3)
    assert space.put(7, [5, 9], 6) and space.num_sequences == 1 and space.num_free == 1
    assert not space.put(8, [1, 2], 8), "there is one block left"
    assert space.take_swaps() == (((5, 0), (9, 1)), ())
    assert space.take(7, [4, 3, 2], num_full=1) == 6
    assert space.take_swaps() == ((), ((1, 3),)), "the first block was found in the prefix cache"
    assert space.num_free == 3 and space.take(7, [], 0) == 0
    space.check_integrity()
    assert "free=3/3" in repr(space)


def test_nothing_goes_out_while_something_comes_back() -> None:
    space = SwapSpace(4)
    assert space.put(1, [5], 3)
    space.take_swaps()
    space.take(1, [6], 0)
    assert not space.put(2, [6], 3)
    space.take_swaps()
    assert space.put(2, [6], 3)


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SwapSpace(-1)
    space = SwapSpace(4)
    assert space.put(1, [5, 6], 7)
    with pytest.raises(ValueError, match="is in host memory already"):
        space.put(1, [5], 3)
    with pytest.raises(ValueError, match="2 blocks do not fit into 1"):
        space.take(1, [5], 0)
    space.drop(1)
    space.drop(1)
    assert space.num_free == 4


def test_a_fork_of_more_than_there_is_is_refused() -> None:
    kv = PagedKVManager(8, 4)
    kv.begin(0, range(6), 6)
    with pytest.raises(ValueError, match="holds 2 blocks, not 3"):
        kv.fork(0, 1, 9)


def test_what_would_come_into_a_block_that_is_copied_is_forgotten() -> None:
    kv = PagedKVManager(4, 4, prefix_cache=False, num_host_blocks=2)
    kv.begin(0, range(6), 6)
    assert kv.swap_out(0, 6)
    kv.free(0)
    kv.take_swaps()
    kv.begin(1, range(6), 6)
    kv.fork(1, 2)
    assert kv.allocate(2, 7)
    copied = kv._copies[0][1]
    kv.free(2)
    kv.begin(0, range(6), 6)
    assert copied in kv.block_ids(0)
    assert kv.swap_in(0) == 0 and kv.num_swapped == 0


@pytest.mark.parametrize("storage", ["auto", "int8", "fp8"])
def test_every_pool_is_copied_to_the_bit(storage: str) -> None:
    specs = [LayerSpec(3, dim, dim + 1, torch.float32, CPU).stored_as(storage) for dim in (5, 8)]
    store = KVStore(specs, 9, 4)
    for kv in store.kv:
        kv.write(torch.randn(40, 3, kv.keys.shape[3]), torch.randn(40, 3, kv.values.shape[3]), torch.arange(40))
    before = [pool.view(torch.uint8).clone() for pool in store.pools]
    host = HostPool(store.pools, 5)
    host.swap_out([(3, 0), (7, 1), (2, 4)])
    for pool in store.pools:
        pool.view(torch.uint8)[[3, 7, 2]] = 0
    host.swap_in([(1, 3), (4, 7), (0, 2)])
    for pool, old in zip(store.pools, before, strict=True):
        now = pool.view(torch.uint8)
        assert torch.equal(now[3], old[7]) and torch.equal(now[7], old[2]) and torch.equal(now[2], old[3])
        assert torch.equal(now[[1, 4, 5, 6, 8, 9]], old[[1, 4, 5, 6, 8, 9]])


def test_size_by_bytes() -> None:
    store = KVStore([LayerSpec(3, 8, 8, torch.float32, CPU)], 9, 4)
    host = HostPool.of_size(store.pools, 3 * store.bytes_per_block + 1)
    assert host.num_blocks == 3 and "3 blocks" in repr(host)
