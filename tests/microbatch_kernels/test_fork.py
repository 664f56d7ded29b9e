"""Fork: shared blocks, and copies before a write."""

from __future__ import annotations

import random

import pytest

from microbatch_kernels.manager import PagedKVManager
from tests.microbatch_kernels.toy import ToyEngine


def test_a_shared_partial_block_is_copied_for_all_writers_but_the_last() -> None:
    engine = ToyEngine(8, 2)
    engine.begin(0, [1, 2, 3])
    engine.fork(0, 1)
    engine.fork(0, 2)
    assert engine.kv.block_ids(1) == engine.kv.block_ids(2) == (1, 2)
    assert engine.kv.num_free_blocks == 6
    assert engine.extend(1, 11) == ((2, 3),)
    assert engine.extend(0, 10) == ((2, 4),)
    assert engine.extend(2, 12) == ()
    assert [engine.kv.block_ids(s) for s in (0, 1, 2)] == [(1, 4), (1, 3), (1, 2)]
    assert engine.kv.statistics().num_copies == 2
    for seq_id in (1, 0, 2):
        engine.free(seq_id)
    assert engine.kv.num_free_blocks == 8


def test_a_full_last_block_is_shared_for_good() -> None:
    engine = ToyEngine(8, 2)
    engine.begin(0, [1, 2, 3, 4])
    engine.fork(0, 1)
    assert engine.extend(0, 10) == engine.extend(1, 11) == ()
    assert [engine.kv.block_ids(s) for s in (0, 1)] == [(1, 2, 3), (1, 2, 4)]


def test_the_copy_is_asked_for_once_and_counted_as_a_block() -> None:
    kv = PagedKVManager(3, 2)
    kv.begin(0, [1, 2, 3], 3)
    kv.commit(0, [1, 2, 3], 3)
    kv.fork(0, 1)
    assert not kv.allocate(1, 5)
    assert kv.take_copies() == ()
    assert kv.block_ids(1) == (1, 2)
    assert kv.allocate(1, 4)
    assert kv.take_copies() == ((2, 3),)
    assert kv.take_copies() == ()
    assert not kv.allocate(0, 5)
    assert kv.allocate(0, 4)
    assert kv.take_copies() == ()
    kv.check_integrity()


def test_blocks_beyond_the_write_stay_shared() -> None:
    kv = PagedKVManager(8, 2)
    kv.begin(0, [1, 2, 3], 6)
    kv.commit(0, [1, 2, 3], 3)
    kv.fork(0, 1)
    assert kv.allocate(1, 4)
    assert kv.block_ids(1) == (1, 4, 3)
    assert kv.allocate(1, 5)
    assert kv.block_ids(1) == (1, 4, 5)
    assert kv.take_copies() == ((2, 4), (3, 5))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_block_that_the_other_has_committed_is_not_written(prefix_cache: bool) -> None:
    """The parent commits after the fork and leaves: the child alone holds the block, and a match could still read
    it."""
    kv = PagedKVManager(4, 2, prefix_cache=prefix_cache)
    kv.begin(0, [1, 2], 2)
    kv.fork(0, 1)
    kv.commit(0, [1, 2], 2)
    kv.free(0)
    assert kv.allocate(1, 2)
    assert kv.block_ids(1) == (2,)
    assert kv.take_copies() == ((1, 2),)
    assert kv.match_prefix([1, 2, 3]) == (2 if prefix_cache else 0)
    kv.check_integrity()


def test_copies_are_made_in_order_even_when_the_first_target_has_left() -> None:
    engine = ToyEngine(4, 2)
    engine.begin(0, [1, 2, 3])
    engine.fork(0, 1)
    engine.fork(0, 2)
    kv = engine.kv
    assert kv.allocate(1, 4)
    kv.fork(1, 3)
    assert kv.allocate(3, 4)
    kv.free(1)
    copies = kv.take_copies()
    assert copies == ((2, 3), (3, 4))
    engine.store.copy(copies)
    engine.store.read(kv.block_ids(3), [1, 2, 3], 3, "")
    kv.check_integrity()


def test_a_child_is_new_and_its_parent_is_not() -> None:
    kv = PagedKVManager(4, 2)
    kv.begin(0, [1], 1)
    with pytest.raises(ValueError, match="sequence 0 has a block table already"):
        kv.fork(0, 0)
    with pytest.raises(KeyError):
        kv.fork(5, 6)
    kv.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_length, copies", [(20, 3), (16, 0)])
def test_b69_four_choices_of_one_prompt(prompt_length: int, copies: int, prefix_cache: bool) -> None:
    """Choices stop at different times and one leaves early; none ever reads a token of another."""
    engine = ToyEngine(32, prefix_cache=prefix_cache)
    engine.begin(0, list(range(prompt_length)))
    for child in (1, 2, 3):
        engine.fork(0, child)
    ends = {0: 40, 1: 5, 2: 1, 3: 25}
    for step in range(41):
        for seq_id, end in ends.items():
            if step < end:
                engine.extend(seq_id, 1000 * seq_id + step)
            elif step == end:
                engine.free(seq_id)
    assert engine.kv.statistics().num_copies == copies
    assert engine.kv.num_free_blocks == 32
    assert engine.kv.statistics().num_sequences == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b22_nothing_leaks_when_requests_leave_at_any_time(prefix_cache: bool) -> None:
    """300 requests with shared prefixes, each dropped at a random moment; then one that needs every block."""
    rng = random.Random(22)
    engine = ToyEngine(64, prefix_cache=prefix_cache)
    live: list[int] = []
    for seq_id in range(300):
        prompt = [rng.randrange(3)] * 32 + [seq_id] * rng.randrange(1, 40)
        while engine.kv.blocks_needed(len(prompt) + 60) > engine.kv.num_free_blocks:
            engine.free(live.pop(rng.randrange(len(live))))
        engine.begin(seq_id, prompt)
        live.append(seq_id)
        if rng.random() < 0.3:
            engine.fork(seq_id, 1000 + seq_id)
            live.append(1000 + seq_id)
        for _ in range(rng.randrange(20)):
            engine.extend(live[-1], rng.randrange(5))
    for seq_id in live:
        engine.free(seq_id)
    assert engine.kv.num_free_blocks == 64
    assert engine.run(2000, [9] * (64 * 16 - 1)) == 0
