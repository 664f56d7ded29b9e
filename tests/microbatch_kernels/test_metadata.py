"""The ints of a packed batch."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from microbatch_kernels.metadata import cu_seqlens, num_blocks_for, slot_mapping


@pytest.mark.parametrize("num_tokens, blocks", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_num_blocks_for(num_tokens: int, blocks: int) -> None:
    assert num_blocks_for(num_tokens, 16) == blocks


@pytest.mark.parametrize(
    "start, count, slots",
    [
        (0, 3, [28, 29, 30]),
        (3, 1, [31]),
        (3, 2, [31, 8]),
        (2, 8, [30, 31, 8, 9, 10, 11, 20, 21]),
        (4, 4, [8, 9, 10, 11]),
        (12, 0, []),
        (0, 0, []),
    ],
)
def test_slot_mapping(start: int, count: int, slots: list[int]) -> None:
    assert slot_mapping([7, 2, 5], start, count, 4) == slots


@pytest.mark.parametrize("start, count", [(0, 13), (12, 1), (-1, 2)])
def test_slots_outside_the_table_are_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"positions {start} to {start + count} are outside 3 blocks of 4"):
        slot_mapping([7, 2, 5], start, count, 4)


@given(st.lists(st.integers(1, 99), max_size=6), st.integers(1, 5), st.data())
def test_slot_mapping_equals_the_obvious_way(table: list[int], block_size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(table) * block_size))
    count = data.draw(st.integers(0, len(table) * block_size - start))
    obvious = [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
    assert slot_mapping(table, start, count, block_size) == obvious


def test_cu_seqlens() -> None:
    assert cu_seqlens([]) == [0]
    assert cu_seqlens([3, 1, 2]) == [0, 3, 4, 6]
