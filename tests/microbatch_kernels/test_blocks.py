"""The block pool: exact ids and the exact order of the free queue."""

from __future__ import annotations

import pytest

from microbatch_kernels.blocks import NULL_BLOCK, BlockPool


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.free_block_ids() == (1, 2, 3, 4)
    assert pool.take(3) == [1, 2, 3]
    assert pool.take(1) == [4]
    assert pool.num_free == 0
    assert NULL_BLOCK == 0
    assert pool.ref_count(NULL_BLOCK) == 0
    pool.check_integrity()


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        pool.take(3)
    assert pool.free_block_ids() == (2, 3)
    assert pool.take(0) == []


def test_worthless_blocks_are_used_again_first() -> None:
    pool = BlockPool(5)
    pool.release(pool.take(3))
    assert pool.free_block_ids() == (1, 2, 3, 4, 5)
    pool.take(5)
    pool.release([4])
    pool.release([2, 5])
    assert pool.free_block_ids() == (2, 5, 4)


def test_cached_blocks_go_to_the_back_tail_first() -> None:
    cached = {1, 2}
    pool = BlockPool(5, cached)
    pool.take(3)
    pool.release([1, 2, 3])
    assert pool.free_block_ids() == (3, 4, 5, 2, 1)
    assert pool.take(4) == [3, 4, 5, 2]
    pool.check_integrity()


def test_a_cached_block_keeps_its_place_until_it_is_shared() -> None:
    cached = {1, 2, 3}
    pool = BlockPool(3, cached)
    pool.take(3)
    pool.release([1, 2, 3])
    assert pool.free_block_ids() == (3, 2, 1)
    pool.share([2])
    assert pool.free_block_ids() == (3, 1)
    pool.share([2])
    pool.release([2])
    assert pool.free_block_ids() == (3, 1)
    assert pool.ref_count(2) == 1
    pool.release([2])
    assert pool.free_block_ids() == (3, 1, 2)
    cached.remove(1)
    with pytest.raises(AssertionError, match="ahead of a worthless one"):
        pool.check_integrity()
    pool.take_next(1)
    assert pool.free_block_ids() == (1, 3, 2)
    pool.check_integrity()


def test_nothing_is_freed_twice() -> None:
    pool = BlockPool(2)
    pool.release(pool.take(1))
    with pytest.raises(ValueError, match="block 1 is free already"):
        pool.release([1])
    pool.check_integrity()


def test_repr_and_size() -> None:
    pool = BlockPool(4)
    pool.take(1)
    assert repr(pool) == "<BlockPool free=3/4>"
    assert pool.num_blocks == 4
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)
