"""Block tables: exact ids, sharing, all or nothing."""

from __future__ import annotations

import pytest

from microbatch_kernels import prefix
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.statistics import KVStatistics
from tests.microbatch_kernels.toy import ToyEngine


def begun(kv: PagedKVManager, seq_id: int, token_ids: list[int], salt: str = "") -> int | None:
    """Begin a sequence, compute its prompt and commit it."""
    cached = kv.begin(seq_id, token_ids, len(token_ids), salt)
    if cached is not None:
        kv.commit(seq_id, token_ids, len(token_ids))
    kv.check_integrity()
    return cached


def test_a_table_grows_block_by_block() -> None:
    kv = PagedKVManager(4, 2)
    assert kv.begin(1, [1, 2, 3], 3) == 0
    assert kv.block_ids(1) == (1, 2)
    assert kv.allocate(1, 4)
    assert kv.block_ids(1) == (1, 2)
    assert kv.allocate(1, 5)
    assert kv.block_ids(1) == (1, 2, 3)
    assert kv.allocate(1, 1)
    assert kv.block_ids(1) == (1, 2, 3)
    assert kv.num_free_blocks == 1
    kv.check_integrity()
    kv.free(1)
    assert kv.num_free_blocks == kv.num_blocks == 4
    assert kv.take_copies() == ()


def test_allocate_is_all_or_nothing() -> None:
    kv = PagedKVManager(4, 2)
    kv.begin(1, [1, 2, 3], 3)
    assert not kv.allocate(1, 9)
    assert kv.block_ids(1) == (1, 2)
    assert kv.allocate(1, 8)
    assert not kv.allocate(1, 9)
    assert kv.num_free_blocks == 0


def test_begin_is_all_or_nothing() -> None:
    kv = PagedKVManager(4, 2)
    assert begun(kv, 1, [1, 2, 3, 4]) == 0
    assert kv.begin(2, [1, 2, 3, 4, 5, 6, 7, 8, 9], 9) is None
    assert kv.statistics().num_sequences == 1
    assert kv.num_free_blocks == 2
    with pytest.raises(KeyError):
        kv.block_ids(2)
    kv.check_integrity()


def test_a_second_sequence_shares_the_prefix() -> None:
    kv = PagedKVManager(8, 2)
    assert begun(kv, 1, [1, 2, 3, 4, 5]) == 0
    assert kv.match_prefix([1, 2, 3, 4, 9]) == 4
    assert begun(kv, 2, [1, 2, 3, 4, 9]) == 4
    assert kv.block_ids(2) == (1, 2, 4)
    assert kv.num_free_blocks == 4
    kv.free(1)
    assert kv.num_free_blocks == 5
    kv.free(2)
    assert kv.num_free_blocks == 8
    assert kv.match_prefix([1, 2, 3, 4, 9]) == 4
    kv.check_integrity()


def test_hits_in_the_free_queue_are_counted_as_taken() -> None:
    """Two of four free blocks are the hits themselves: two are left for the rest, not four."""
    kv = PagedKVManager(4, 2)
    begun(kv, 1, [1, 2, 3, 4])
    kv.free(1)
    assert kv.num_free_blocks == 4
    assert kv.begin(2, [1, 2, 3, 4, 5], 9) is None
    assert kv.num_free_blocks == 4
    assert kv.begin(2, [1, 2, 3, 4, 5], 8) == 4
    assert kv.block_ids(2) == (1, 2, 3, 4)
    kv.check_integrity()


def test_only_committed_blocks_are_shared() -> None:
    kv = PagedKVManager(8, 2)
    kv.begin(1, [1, 2, 3, 4, 5], 5)
    assert kv.match_prefix([1, 2, 3, 4, 5]) == 0
    kv.commit(1, [1, 2, 3, 4, 5], 3)
    assert kv.match_prefix([1, 2, 3, 4, 5]) == 2
    kv.commit(1, [1, 2, 3, 4, 5], 2)
    kv.commit(1, [1, 2, 3, 4, 5], 5)
    assert kv.match_prefix([1, 2, 3, 4, 5]) == 4


@pytest.mark.parametrize("token_ids, computed", [([1, 2], 3), ([1, 2, 3, 4, 5, 6], 5)])
def test_commit_refuses_more_than_there_is(token_ids: list[int], computed: int) -> None:
    kv = PagedKVManager(8, 2)
    kv.begin(1, [1, 2, 3], 3)
    with pytest.raises(ValueError, match=f"sequence 1: {computed} tokens computed"):
        kv.commit(1, token_ids, computed)
    assert kv.match_prefix([1, 2, 3]) == 0


def test_commit_reads_only_the_new_full_blocks() -> None:
    class Counting(list[int]):
        """A list that remembers which parts of it were read."""

        read: list[slice] = []

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            assert isinstance(index, slice)
            self.read.append(index)
            return super().__getitem__(index)

    kv = PagedKVManager(8, 2)
    token_ids = Counting([1, 2, 3, 4, 5, 6])
    kv.begin(1, [1, 2, 3, 4, 5, 6], 6)
    kv.commit(1, token_ids, 4)
    kv.commit(1, token_ids, 5)
    kv.commit(1, token_ids, 6)
    assert Counting.read == [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_free_order_keeps_cached_prefixes_longest() -> None:
    kv = PagedKVManager(6, 2)
    begun(kv, 1, [1, 2, 3, 4, 5])
    kv.free(1)
    assert kv._pool.free_block_ids() == (3, 4, 5, 6, 2, 1)
    begun(kv, 2, [7, 8, 9, 0, 1, 2, 3, 4, 5])
    assert kv.block_ids(2) == (3, 4, 5, 6, 2)
    assert kv.match_prefix([1, 2, 3, 4, 5]) == 2
    assert kv.statistics().num_evictions == 1
    kv.free(2)
    assert kv._pool.free_block_ids() == (2, 1, 6, 5, 4, 3)
    kv.check_integrity()


def test_blocks_of_equal_content_are_both_kept_while_both_are_held() -> None:
    kv = PagedKVManager(8, 2)
    kv.begin(1, [1, 2, 3], 3)
    kv.begin(2, [1, 2, 3], 3)
    kv.commit(1, [1, 2, 3], 3)
    kv.commit(2, [1, 2, 3], 3)
    assert (kv.block_ids(1), kv.block_ids(2)) == ((1, 2), (3, 4))
    assert begun(kv, 3, [1, 2, 3]) == 2
    assert kv.block_ids(3) == (1, 5)
    kv.free(3)
    kv.free(1)
    assert kv._pool.free_block_ids() == (1, 2, 5, 6, 7, 8)
    assert begun(kv, 3, [1, 2, 3]) == 2
    assert kv.block_ids(3) == (3, 1)
    kv.check_integrity()


def test_a_block_computed_again_takes_the_place_of_an_idle_one() -> None:
    """A prompt of exactly one block matches nothing, so its block is computed again: one copy of it is enough."""
    kv = PagedKVManager(4, 2)
    begun(kv, 1, [1, 2])
    kv.free(1)
    assert kv._pool.free_block_ids() == (2, 3, 4, 1)
    assert begun(kv, 2, [1, 2]) == 0
    assert kv._pool.free_block_ids() == (1, 3, 4)
    kv.free(2)
    assert kv._pool.free_block_ids() == (1, 3, 4, 2)
    kv.check_integrity()


def test_a_table_holds_the_cached_prefix_even_where_less_was_asked_for() -> None:
    kv = PagedKVManager(4, 2)
    begun(kv, 1, [1, 2, 3, 4, 5])
    assert kv.begin(2, [1, 2, 3, 4, 5], 1) == 4
    assert kv.block_ids(2) == (1, 2)


def test_a_salt_isolates() -> None:
    kv = PagedKVManager(8, 2)
    begun(kv, 1, [1, 2, 3], "a")
    assert kv.match_prefix([1, 2, 3]) == 0
    assert begun(kv, 2, [1, 2, 3], "b") == 0
    assert begun(kv, 3, [1, 2, 3], "a") == 2


def test_without_the_prefix_cache_nothing_is_shared_or_kept() -> None:
    kv = PagedKVManager(4, 2, prefix_cache=False)
    begun(kv, 1, [1, 2, 3, 4, 5])
    assert begun(kv, 2, [1]) == 0
    assert kv.match_prefix([1, 2, 3, 4, 5]) == 0
    kv.free(1)
    assert kv.statistics().num_cached_blocks == 0
    assert kv._pool.free_block_ids() == (1, 2, 3)
    kv.check_integrity()


def test_nothing_is_begun_or_freed_twice() -> None:
    kv = PagedKVManager(4, 2)
    kv.begin(1, [1], 1)
    with pytest.raises(ValueError, match="sequence 1 has a block table already"):
        kv.begin(1, [1], 1)
    kv.free(1)
    with pytest.raises(KeyError):
        kv.free(1)
    with pytest.raises(KeyError):
        kv.allocate(1, 2)
    with pytest.raises(KeyError):
        kv.commit(1, [1], 1)
    assert kv.num_free_blocks == 4


def test_facts() -> None:
    kv = PagedKVManager(8, 2)
    begun(kv, 1, [1, 2, 3])
    assert kv.block_size == 2
    assert [kv.blocks_needed(n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert kv.max_num_tokens() == 16
    assert kv.statistics() == KVStatistics(8, 6, 1, 0, 1, 0, 0, 0, 0)
    assert repr(kv) == "<PagedKVManager blocks=2/8 cached=1 pinned=0 sequences=1>"
    assert repr(kv._pool) == "<CachedBlockPool free=6/8 cached=1>"
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        PagedKVManager(8, 0)


def test_check_integrity_sees_a_lost_reference() -> None:
    kv = PagedKVManager(4, 2)
    kv.begin(1, [1, 2, 3], 3)
    kv._tables[1].block_ids.pop()
    with pytest.raises(AssertionError, match="references differ from holders"):
        kv.check_integrity()


# ---- cases that users of other servers met


def test_b63_evicted_and_edited_prefixes_are_never_matched() -> None:
    engine = ToyEngine(16)
    prompts = [[100 * k + i for i in range(60)] for k in range(6)]
    assert engine.run(0, prompts[0]) == 0
    assert engine.run(1, prompts[0]) == 48
    for k in range(1, 6):
        assert engine.run(k + 1, prompts[k]) == 0
    assert engine.run(7, prompts[0]) == 0
    assert engine.run(8, prompts[0] + [1, 2, 3, 4, 5]) == 48
    assert engine.run(9, prompts[0][:40] + [7] * 20) == 32
    assert engine.run(10, [7, *prompts[0][1:]]) == 0
    assert engine.kv.num_free_blocks == 16
    assert engine.kv.statistics().num_evictions > 0


@pytest.mark.parametrize("length, cached", [(16, 0), (32, 16), (48, 32), (31, 16), (33, 32)])
def test_b64_a_match_leaves_a_token_to_compute(length: int, cached: int) -> None:
    engine = ToyEngine(16)
    prompt = list(range(length))
    assert engine.run(1, prompt) == 0
    assert engine.begin(2, prompt) == cached
    assert engine.begin(3, prompt) == cached
    engine.free(2)
    engine.free(3)
    assert engine.run(4, prompt) == cached
    assert engine.kv.num_free_blocks == 16


def test_b68_two_that_block_each_other() -> None:
    """Neither can grow; when one gives way the other can, and nothing is lost by the refusals."""
    kv = PagedKVManager(10)
    begun(kv, 1, list(range(80)))
    begun(kv, 2, list(range(100, 180)))
    assert not kv.allocate(1, 81)
    assert not kv.allocate(2, 81)
    kv.free(2)
    assert kv.allocate(1, 160)
    assert kv.blocks_needed(200) > kv.num_blocks
    assert kv.max_num_tokens() == 160


@pytest.mark.parametrize("hash_values", [1, 2])
def test_b62_colliding_hashes_change_nothing(monkeypatch: pytest.MonkeyPatch, hash_values: int) -> None:
    prompts = [list(range(k, k + 40)) for k in range(4)] + [list(range(20)) + [3] * 20]
    plain = ToyEngine(32)
    expected = [plain.run(i, p) for i, p in enumerate(prompts * 2)]
    calls: list[int] = []

    def colliding(parent_hash: int, token_ids: tuple[int, ...], salt: str) -> int:
        calls.append(parent_hash)
        return sum(token_ids) % hash_values

    monkeypatch.setattr(prefix, "block_hash", colliding)
    engine = ToyEngine(32)
    assert [engine.run(i, p) for i, p in enumerate(prompts * 2)] == expected == [0, 0, 0, 0, 16, 32, 32, 32, 32, 32]
    assert calls, "the hash was replaced"
