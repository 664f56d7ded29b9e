"""The ints that a packed batch needs: which slot, which position, where each sequence begins. No tensors here.

A packed batch lays the new tokens of all sequences end to end, without padding. T is their number, B the number of
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def slot_mapping(block_ids: Sequence[int], start: int, count: int, block_size: int) -> list[int]:
    """Slots of positions [start, start + count): ``block_id * block_size + offset``.

    Raises ``ValueError`` when the block table is too short, so that a wrong plan never writes into a stranger's block.
    """
    if start < 0 or start + count > len(block_ids) * block_size:
        raise ValueError(f"positions {start} to {start + count} are outside {len(block_ids)} blocks of {block_size}")
    if count == 1:  # a decode: most calls, and a third of the time
        return [block_ids[start // block_size] * block_size + start % block_size]
    slots: list[int] = []
    position, end = start, start + count
    while position < end:
        block, offset = divmod(position, block_size)
        length = min(block_size - offset, end - position)
        first = block_ids[block] * block_size + offset
        slots.extend(range(first, first + length))
        position += length
    return slots


def cu_seqlens(lengths: Iterable[int]) -> list[int]:
    """Running sums from 0, ``[B + 1]``: sequence b lies at [cu[b], cu[b + 1]) of a packed batch."""
    return list(accumulate(lengths, initial=0))
