"""Blocks that keep their content: the two rules, and what breaks them."""

from __future__ import annotations

import pytest

from microbatch_kernels.cached_pool import CachedBlockPool


def filled(pool: CachedBlockPool, *contents: tuple[int, ...]) -> list[int]:
    """Take blocks and fill them with a chain of contents."""
    block_ids = pool.take(len(contents))
    parent: int | None = None
    for block_id, content in zip(block_ids, contents):
        pool.fill(block_id, parent, content, "")
        parent = block_id
    pool.check_integrity()
    return block_ids


def test_taking_a_cached_block_forgets_it() -> None:
    pool = CachedBlockPool(2, 1)
    pool.release(filled(pool, (7,), (8,)))
    assert pool.free_block_ids() == (2, 1)
    assert pool.match([7, 8, 9], "") == [1, 2]
    assert pool.take(1) == [2]
    assert pool.match([7, 8, 9], "") == [1]
    assert pool.num_evictions == 1
    assert pool.num_cached == 1
    pool.check_integrity()


def test_a_parent_is_evicted_after_all_that_stand_on_it() -> None:
    """Block 3 has the content of block 1 and carries block 4. Block 1 leaves last, and takes no longer place."""
    pool = CachedBlockPool(4, 1)
    first = filled(pool, (7,), (8,))
    second = pool.take(2)
    pool.fill(second[0], None, (7,), "")
    pool.fill(second[1], second[0], (9,), "")
    pool.check_integrity()
    pool.release(second)
    assert pool.free_block_ids() == (3, 4)
    assert pool.match([7, 9, 0], "") == [1, 4]
    pool.check_integrity()
    pool.release(first)
    assert pool.free_block_ids() == (3, 4, 2, 1)
    pool.check_integrity()


def test_the_parent_of_a_content_must_be_known() -> None:
    pool = CachedBlockPool(2, 1)
    parent, child = pool.take(2)
    with pytest.raises(KeyError):
        pool.fill(child, parent, (1,), "")
    pool.check_integrity()


def test_who_sees_a_block() -> None:
    pool = CachedBlockPool(2, 1)
    (block_id,) = pool.take(1)
    assert not pool.is_seen(block_id)
    pool.share([block_id])
    assert pool.is_seen(block_id)
    pool.release([block_id])
    pool.fill(block_id, None, (1,), "")
    assert pool.is_seen(block_id)
    assert pool.ref_count(block_id) == 1
    assert pool.num_pins(block_id) == 0


def test_without_keeping_only_pinned_contents_are_matched() -> None:
    pool = CachedBlockPool(3, 1, keep=False)
    block_ids = filled(pool, (7,), (8,))
    assert pool.match([7, 8, 9], "") == []
    assert pool.find([7, 8], "") == [1, 2]
    pool.pin(block_ids[:1])
    assert pool.match([7, 8, 9], "") == [1]
    pool.release(block_ids)
    pool.check_integrity()
    assert pool.num_cached == 1
    pool.unpin(block_ids[:1])
    pool.check_integrity()
    assert pool.num_cached == 0
    assert pool.free_block_ids() == (1, 2, 3)


def test_check_integrity_sees_a_spare_that_is_kept() -> None:
    pool = CachedBlockPool(2, 1)
    filled(pool, (7,))
    (other,) = pool.take(1)
    pool.fill(other, None, (7,), "")
    pool._blocks.release([other])
    with pytest.raises(AssertionError, match="a spare block"):
        pool.check_integrity()


def test_check_integrity_sees_a_prefix_that_would_go_first() -> None:
    pool = CachedBlockPool(2, 1)
    pool.release(filled(pool, (7,), (8,))[::-1])
    assert pool.free_block_ids() == (1, 2)
    with pytest.raises(AssertionError, match="block 2 would lose its prefix"):
        pool.check_integrity()


def test_check_chain_wants_known_blocks_in_their_order() -> None:
    pool = CachedBlockPool(3, 1)
    block_ids = filled(pool, (7,), (8,))
    pool.check_chain(block_ids, "")
    with pytest.raises(AssertionError, match="block 2 follows another prefix"):
        pool.check_chain([2], "")
    with pytest.raises(AssertionError, match="block 1 follows another prefix"):
        pool.check_chain([1], "salt")
    with pytest.raises(AssertionError, match="block 3 is full and its content is not known"):
        pool.check_chain([3], "")
