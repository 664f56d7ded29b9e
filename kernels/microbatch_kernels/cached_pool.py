"""The block pool and the prefix cache as one: blocks that keep their content when nobody holds them.

Two rules hold between any two calls. A content is kept by an unreferenced block only when no other block has it. Every
holder of a block holds blocks of its whole prefix too and gives back the tail first, so in the free queue what stands
on a prefix is ahead of it, and prefixes are evicted from their ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from microbatch_kernels.blocks import BlockPool
from microbatch_kernels.prefix import PrefixCache, PrefixNode


class CachedBlockPool:
    """Blocks by id, with references and content. ``keep=False``: an unreferenced block is forgotten at once, and only
    pinned contents are matched."""

    def __init__(self, num_blocks: int, block_size: int, *, keep: bool = True) -> None:
        self._prefixes = PrefixCache(block_size)
        self._blocks = BlockPool(num_blocks, self._prefixes)
        self._keep = keep
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self._blocks.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return self._blocks.num_free

    @property
    def num_cached(self) -> int:
        """Blocks with known content, referenced or not."""
        return len(self._prefixes)

    def ref_count(self, block_id: int) -> int:
        """References to a block."""
        return self._blocks.ref_count(block_id)

    def num_pins(self, block_id: int) -> int:
        """Pins on the content of a block."""
        return self._prefixes.node(block_id).num_pins if block_id in self._prefixes else 0

    def free_block_ids(self) -> tuple[int, ...]:
        """The free queue, next one first."""
        return self._blocks.free_block_ids()

    def is_seen(self, block_id: int) -> bool:
        """Whether a block has a second holder, or could get one by a match: then it must not be written."""
        return self._blocks.ref_count(block_id) > 1 or block_id in self._prefixes

    # ---- looking up

    def match(self, token_ids: Sequence[int], salt: str, *, pinned_only: bool = False) -> list[int]:
        """Blocks of the longest prefix that may be shared and leaves at least one token to compute. Changes nothing."""
        nodes = self._prefixes.match(token_ids, salt, pinned_only=pinned_only or not self._keep)
        return [node.block_ids[0] for node in nodes]

    def find(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Blocks of all full blocks of a text; ``LookupError`` when one is not cached. Changes nothing."""
        return [node.block_ids[0] for node in self._prefixes.find(token_ids, salt)]

    # ---- references

    def take(self, count: int) -> list[int]:
        """Hand out blocks; what was cached in them is forgotten. ``ValueError`` when fewer are free."""
        block_ids = self._blocks.take(count)
        for block_id in block_ids:
            if block_id in self._prefixes:
                self._prefixes.drop(block_id)
                self.num_evictions += 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block."""
        self._blocks.share(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block of a table, the last first. Content worth keeping stays known."""
        for block_id in reversed(block_ids):
            if self._blocks.ref_count(block_id) == 1 and block_id in self._prefixes and self._is_spare(block_id):
                self._prefixes.drop(block_id)
        self._blocks.release(block_ids)

    def _is_spare(self, block_id: int) -> bool:
        return not self._keep or len(self._prefixes.node(block_id).block_ids) > 1

    # ---- content

    def fill(self, block_id: int, parent_block_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
        """A referenced block now holds these tokens, after the content of its parent (None: at the start).

        ``KeyError`` when the parent's content is unknown, ``ValueError`` when the block is known to hold other tokens.
        """
        parent = None if parent_block_id is None else self._prefixes.node(parent_block_id)
        node = self._prefixes.insert(parent, token_ids, salt, block_id)
        # The unreferenced block of a match that had to stop one token short is of no use beside this one.
        spare = node.block_ids[0]
        if self._blocks.ref_count(spare) == 0:
            self._prefixes.drop(spare)
            self._blocks.take_next(spare)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, and match its content whatever ``keep`` says."""
        self._blocks.share(block_ids)
        for block_id in block_ids:
            self._prefixes.node(block_id).num_pins += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo ``pin``."""
        for block_id in block_ids:
            self._prefixes.node(block_id).num_pins -= 1
        self.release(block_ids)

    # ---- checks

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when blocks and contents disagree or one of the two rules is broken."""
        self._blocks.check_integrity()
        self._prefixes.check_integrity()
        order = {block_id: place for place, block_id in enumerate(self.free_block_ids())}
        for block_id, place in order.items():
            if block_id not in self._prefixes:
                continue
            node = self._prefixes.node(block_id)
            assert self._keep, f"block {block_id} is kept and should not be"
            assert node.block_ids == [block_id], f"a spare block of {node!r} is kept"
            assert node.num_pins == 0, f"{node!r} is pinned and not referenced"
            if node.parent is not None:
                parent_place = order.get(node.parent.block_ids[0], len(order))
                assert parent_place > place, f"block {block_id} would lose its prefix"

    def check_chain(self, block_ids: Sequence[int], salt: str) -> None:
        """Raise ``AssertionError`` unless each block is known to hold what follows the block before it."""
        parent: PrefixNode | None = None
        for block_id in block_ids:
            assert block_id in self._prefixes, f"block {block_id} is full and its content is not known"
            node = self._prefixes.node(block_id)
            assert node.parent is parent and node.salt == salt, f"block {block_id} follows another prefix"
            parent = node

    def __repr__(self) -> str:
        return f"<CachedBlockPool free={self.num_free}/{self.num_blocks} cached={self.num_cached}>"
