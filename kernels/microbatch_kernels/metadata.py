"""The ints that a packed batch needs: which slot, which position, where each sequence begins. No tensors here.

A packed batch lays the new tokens of all sequences end to end, without padding. T is their number, B the number of
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from microbatch_kernels.blocks import NULL_BLOCK


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


def pad_block_tables(block_tables: Sequence[Sequence[int]], width: int | None = None) -> list[list[int]]:
    """Block tables as rows of one length, filled up with the null block: ``[B, width]``.

    ``width`` is that of the longest table unless given; ``ValueError`` when a table is longer.
    """
    longest = max(map(len, block_tables), default=0)
    if width is None:
        width = longest
    if longest > width:
        raise ValueError(f"a block table of {longest} blocks does not fit into {width}")
    return [[*table, *[NULL_BLOCK] * (width - len(table))] for table in block_tables]


def cu_seqlens(lengths: Iterable[int]) -> list[int]:
    """Running sums from 0, ``[B + 1]``: sequence b lies at [cu[b], cu[b + 1]) of a packed batch."""
    return list(accumulate(lengths, initial=0))


class PackedMetadata(NamedTuple):
    """Everything that packed attention over a paged context needs, as ints."""

    #: New tokens of each sequence, ``[B]``.
    query_lens: list[int]
    #: Tokens of each sequence with the new ones, ``[B]``.
    context_lens: list[int]
    #: Where each sequence begins among the new tokens, ``[B + 1]``.
    cu_seqlens_q: list[int]
    #: Where each sequence begins when contexts are laid end to end, ``[B + 1]``.
    cu_seqlens_k: list[int]
    #: Position of each new token in its sequence, ``[T]``.
    positions: list[int]
    #: Where the K/V of each new token goes, ``[T]``.
    slot_mapping: list[int]
    #: The blocks that hold each context, padded with the null block, ``[B, max_blocks]``.
    block_tables: list[list[int]]
    #: Index of each sequence's last token among the new tokens, ``[B]``: the logits to keep.
    last_indices: list[int]

    @classmethod
    def build(cls, rows: Sequence[tuple[Sequence[int], int, int]], block_size: int) -> PackedMetadata:
        """From (block_ids, start, count) of each sequence: ``count`` >= 1 new tokens at positions from ``start``.

        A block table may be longer than its context; raises ``ValueError`` when it is too short or a row is empty.
        """
        if any(count < 1 for _, _, count in rows):
            raise ValueError("every sequence of a packed batch has at least one new token")
        query_lens = [count for _, _, count in rows]
        context_lens = [start + count for _, start, count in rows]
        cu_seqlens_q = cu_seqlens(query_lens)
        num_blocks = [-(-length // block_size) for length in context_lens]
        return cls(
            query_lens=query_lens,
            context_lens=context_lens,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens(context_lens),
            positions=[p for _, start, count in rows for p in range(start, start + count)],
            slot_mapping=[s for table, start, count in rows for s in slot_mapping(table, start, count, block_size)],
            block_tables=pad_block_tables([table[:n] for (table, _, _), n in zip(rows, num_blocks, strict=True)]),
            last_indices=[end - 1 for end in cu_seqlens_q[1:]],
        )
