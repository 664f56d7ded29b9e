"""Declared prefixes: kept under any pressure, matched even without the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.tables import PinnedPrefix
from tests.microbatch_kernels.toy import ToyEngine

SYSTEM = [1, 2, 3, 4, 5]


def pinned(num_blocks: int, *, prefix_cache: bool = True, salt: str = "") -> tuple[ToyEngine, PinnedPrefix]:
    """An engine of blocks of two tokens that has computed and pinned ``SYSTEM``."""
    engine = ToyEngine(num_blocks, 2, prefix_cache=prefix_cache)
    engine.begin(0, SYSTEM, salt)
    pin = engine.kv.pin(SYSTEM, salt)
    engine.free(0)
    return engine, pin


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pinned_prefix_survives_any_pressure(prefix_cache: bool) -> None:
    engine, pin = pinned(6, prefix_cache=prefix_cache)
    assert pin == PinnedPrefix(prefix_id=0, num_tokens=4, block_ids=(1, 2), salt="")
    assert engine.kv.num_free_blocks == 4
    for seq_id in range(1, 9):
        engine.run(seq_id, [seq_id + 10] * 7)
    assert engine.begin(9, [*SYSTEM, 6, 7]) == 4
    assert engine.kv.block_ids(9)[:2] == (1, 2)
    engine.free(9)
    engine.kv.unpin(pin)
    engine.kv.check_integrity()
    assert engine.kv.num_free_blocks == 6
    assert engine.kv.match_prefix(SYSTEM) == (4 if prefix_cache else 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_sequence_keeps_a_prefix_that_is_unpinned(prefix_cache: bool) -> None:
    engine, pin = pinned(6, prefix_cache=prefix_cache)
    engine.begin(1, [*SYSTEM, 6])
    engine.kv.unpin(pin)
    engine.kv.check_integrity()
    assert engine.kv.num_free_blocks == 3
    engine.extend(1, 7)
    engine.free(1)
    assert engine.kv.num_free_blocks == 6


def test_without_the_prefix_cache_only_the_pinned_part_is_shared() -> None:
    engine, _ = pinned(12, prefix_cache=False)
    assert engine.begin(1, [*SYSTEM, 6, 7, 8]) == 4
    assert engine.begin(2, [*SYSTEM, 6, 7, 8]) == 4
    assert engine.kv.match_prefix([*SYSTEM, 6, 7, 8, 9]) == 4


def test_pins_are_counted() -> None:
    engine, first = pinned(6)
    second = engine.kv.pin([1, 2])
    assert second == PinnedPrefix(1, 2, (1,), "")
    assert engine.kv.statistics().num_pinned_blocks == 2
    engine.kv.check_integrity()
    engine.kv.unpin(first)
    assert engine.kv.statistics().num_pinned_blocks == 1
    assert engine.kv.num_free_blocks == 5
    with pytest.raises(KeyError):
        engine.kv.unpin(first)
    engine.kv.unpin(second)
    engine.kv.check_integrity()
    assert engine.kv.num_free_blocks == 6


def test_a_prefix_must_have_been_computed() -> None:
    kv = PagedKVManager(6, 2)
    kv.begin(0, SYSTEM, 5)
    with pytest.raises(LookupError, match="only 0 of the prefix's 2 full blocks are cached"):
        kv.pin(SYSTEM)
    kv.commit(0, SYSTEM, 3)
    with pytest.raises(LookupError, match="only 1 of the prefix's 2 full blocks are cached"):
        kv.pin(SYSTEM)
    assert kv.statistics().num_pinned_blocks == 0
    kv.free(0)
    assert kv.num_free_blocks == 6


def test_a_prefix_below_one_block_pins_nothing() -> None:
    kv = PagedKVManager(6, 2)
    pin = kv.pin([1])
    assert (pin.num_tokens, pin.block_ids) == (0, ())
    kv.check_integrity()
    kv.unpin(pin)


def test_an_idle_prefix_can_still_be_pinned() -> None:
    engine = ToyEngine(6, 2)
    engine.run(0, SYSTEM)
    pin = engine.kv.pin(SYSTEM)
    assert engine.kv.num_free_blocks == 4
    assert pin.block_ids == (1, 2)
    engine.kv.check_integrity()


def test_a_salted_prefix_is_for_its_salt() -> None:
    engine, _ = pinned(6, salt="a")
    assert engine.kv.match_prefix(SYSTEM, "a") == 4
    assert engine.kv.match_prefix(SYSTEM) == 0


def test_room_beside_the_pins() -> None:
    engine, _ = pinned(6)
    assert engine.kv.max_num_tokens([9, 9, 9]) == 8
    assert engine.kv.max_num_tokens([*SYSTEM, 9]) == 12
    assert engine.kv.max_num_tokens([1, 2, 3, 4]) == 10
    assert engine.kv.begin(1, [*SYSTEM, 9], 12) == 4
    assert engine.kv.num_free_blocks == 0


def test_a_pinned_block_stays_the_one_that_is_matched() -> None:
    engine, pin = pinned(8)
    assert engine.begin(1, [1, 2, 3, 4]) == 2
    assert engine.kv.block_ids(1) == (1, 3)
    engine.free(1)
    assert engine.begin(2, SYSTEM) == 4
    assert engine.kv.block_ids(2)[:2] == pin.block_ids
    assert engine.kv._pool.free_block_ids()[0] == 4


def test_check_integrity_sees_a_lost_pin() -> None:
    engine, pin = pinned(6)
    engine.kv._pins[0] = replace(pin, block_ids=(1,))
    with pytest.raises(AssertionError, match="references differ from holders"):
        engine.kv.check_integrity()


def test_the_pinned_part_of_a_prompt_is_known() -> None:
    engine, pin = pinned(12)
    assert engine.kv.num_pinned_tokens([*SYSTEM, 6]) == 4
    assert engine.kv.num_pinned_tokens(SYSTEM[:4]) == 2  # one token is left to compute
    assert engine.kv.num_pinned_tokens([9, 9, 9]) == engine.kv.num_pinned_tokens([*SYSTEM, 6], "salt") == 0
    engine.kv.unpin(pin)
    assert engine.kv.num_pinned_tokens([*SYSTEM, 6]) == 0
