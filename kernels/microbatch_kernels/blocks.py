"""The pool of blocks: who references what, and which block is handed out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final

#: The block that padding points at. It is never handed out and nothing is stored in it.
NULL_BLOCK: Final = 0


class BlockPool:
    """Reference counts of blocks 1 to ``num_blocks`` and the queue of the free ones.

    Free blocks are taken from the front. A block that is freed goes to the front when its content is worthless (it is
    used again while it is warm) and to the back when it is in ``cached``, a live view of the blocks whose content can
    still be matched. So worthless blocks are used up before the first cached one is taken, then the longest unused.
    """

    def __init__(self, num_blocks: int, cached: Container[int] = frozenset()) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self._cached = cached
        self._ref_counts = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out (the null block not counted)."""
        return len(self._ref_counts) - 1

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """References to a block."""
        return self._ref_counts[block_id]

    def free_block_ids(self) -> tuple[int, ...]:
        """The free queue, next one first."""
        return tuple(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each. The caller must forget what was cached in them.

        Raises ``ValueError`` and changes nothing when fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block. A free one leaves the queue, from any place in it."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block of a table, the last first, so that a chain loses its tail before its head.

        Raises ``ValueError`` for a block without a reference.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is free already")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._cached:
                    self._free.move_to_end(block_id, last=False)

    def take_next(self, block_id: int) -> None:
        """Move a free block to the front: its content is worthless from now on."""
        self._free.move_to_end(block_id, last=False)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when counts and queue disagree, or a cached block is ahead of a worthless one."""
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block is referenced"
        assert all(count >= 0 for count in self._ref_counts), f"negative reference counts: {self._ref_counts}"
        unreferenced = {b for b in range(1, self.num_blocks + 1) if self._ref_counts[b] == 0}
        assert self._free.keys() == unreferenced, f"lost or doubly used blocks: {self._free.keys() ^ unreferenced}"
        order = [block_id in self._cached for block_id in self._free]
        assert order == sorted(order), f"a cached block is ahead of a worthless one: {self.free_block_ids()}"

    def __repr__(self) -> str:
        return f"<BlockPool free={self.num_free}/{self.num_blocks}>"
