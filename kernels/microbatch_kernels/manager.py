"""The ledger of the paged K/V store: which blocks belong to which sequence, and what they share.

It moves no byte. Its owner computes K/V into the blocks it is given, says so with ``commit``, and makes the copies that
``take_copies`` and ``take_swaps`` ask for. What keeps shared content safe: a block is matched only after it is full and
committed, it is never written again, and ``allocate``, which comes before every write, replaces what others can see by
a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from microbatch_kernels.cached_pool import CachedBlockPool
from microbatch_kernels.metadata import num_blocks_for
from microbatch_kernels.statistics import KVStatistics
from microbatch_kernels.swap_space import Swaps, SwapSpace
from microbatch_kernels.tables import BlockTable, PinnedPrefix


class PagedKVManager:
    """Blocks 1 to ``num_blocks`` of ``block_size`` token slots each. Not thread-safe: one owner calls it.

    ``prefix_cache=False``: sequences share nothing but forks and pinned prefixes, and a freed block is forgotten at
    once. ``num_host_blocks``: as many more in host memory, for sequences that are swapped out.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, prefix_cache: bool = True, num_host_blocks: int = 0
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self._block_size = block_size
        self._pool = CachedBlockPool(num_blocks, block_size, keep=prefix_cache)
        self._tables: dict[int, BlockTable] = {}
        self._pins: dict[int, PinnedPrefix] = {}
        self._copies: list[tuple[int, int]] = []
        self._swap_space = SwapSpace(num_host_blocks)
        self._next_prefix_id = 0
        self._num_copies = 0

    # ---- facts

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out (the null block not counted)."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nothing references, cached ones included."""
        return self._pool.num_free

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return num_blocks_for(num_tokens, self._block_size)

    def block_ids(self, seq_id: int) -> tuple[int, ...]:
        """The block table of a sequence, in order; ``KeyError`` when it has none."""
        return tuple(self._tables[seq_id].block_ids)

    def match_prefix(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Number of leading tokens whose K/V is cached, a multiple of ``block_size``. Changes nothing.

        At least one token is left to compute, so the result is below ``len(token_ids)``. Valid until the next call that
        changes the manager.
        """
        return len(self._pool.match(token_ids, salt)) * self._block_size

    def num_pinned_tokens(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Leading tokens of a prompt that lie in pinned blocks; as ``match_prefix``, below ``len(token_ids)``."""
        return len(self._pool.match(token_ids, salt, pinned_only=True)) * self._block_size if self._pins else 0

    def max_num_tokens(self, token_ids: Sequence[int] = (), salt: str = "") -> int:
        """The most tokens that a sequence with this prompt can hold when it is alone: all but the pins of others.

        Valid until the next ``pin`` or ``unpin``. A request that needs more can never run.
        """
        shared = len(self._pool.match(token_ids, salt, pinned_only=True))
        return (self.num_blocks - self._num_pinned_blocks() + shared) * self._block_size

    def statistics(self) -> KVStatistics:
        """Counts of now and since the start."""
        return KVStatistics(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self._pool.num_cached,
            num_pinned_blocks=self._num_pinned_blocks(),
            num_sequences=len(self._tables),
            num_evictions=self._pool.num_evictions,
            num_copies=self._num_copies,
            num_host_blocks=self._swap_space.num_blocks,
            num_free_host_blocks=self._swap_space.num_free,
        )

    # ---- the life of a block table

    def begin(self, seq_id: int, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Give a new sequence a block table for ``num_tokens`` tokens, its cached prefix shared, the rest fresh.

        All or nothing: returns the number of cached tokens (as ``match_prefix``), or None and changes nothing when too
        few blocks are free. The table holds the cached prefix even where that is longer than ``num_tokens``.
        Raises ``ValueError`` when the sequence has a table already.
        """
        self._check_new(seq_id)
        hits = self._pool.match(token_ids, salt)
        num_fresh = max(0, self.blocks_needed(num_tokens) - len(hits))
        # A hit that nobody holds is in the free queue: sharing it uses up a free block too.
        num_revived = sum(self._pool.ref_count(block_id) == 0 for block_id in hits)
        if num_fresh + num_revived > self.num_free_blocks:
            return None
        self._pool.share(hits)
        self._tables[seq_id] = BlockTable(hits + self._pool.take(num_fresh), len(hits), salt)
        return len(hits) * self._block_size

    def allocate(self, seq_id: int, num_tokens: int) -> bool:
        """Make a table ready for writing up to position ``num_tokens`` - 1. All or nothing; False changes nothing.

        It grows where it is too short, and never shrinks. Blocks that are not full yet and that others can see are
        replaced by copies (``take_copies``). Call it before each step that writes. Raises ``KeyError`` without a table.
        """
        table = self._tables[seq_id]
        end = self.blocks_needed(num_tokens)
        num_fresh = max(0, end - len(table.block_ids))
        written = range(table.num_full, min(end, len(table.block_ids)))
        seen = [index for index in written if self._pool.is_seen(table.block_ids[index])]
        if num_fresh + len(seen) > self.num_free_blocks:
            return False
        for index in seen:
            self._copy_on_write(table, index)
        table.block_ids += self._pool.take(num_fresh)
        return True

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """K/V of the first ``num_computed_tokens`` tokens is written: full blocks among them become shareable.

        Reads ``token_ids`` only where blocks have become full since the last call. Raises ``ValueError`` and changes
        nothing when the table or ``token_ids`` is shorter than what is said to be computed.
        """
        table, size = self._tables[seq_id], self._block_size
        if num_computed_tokens > min(len(token_ids), len(table.block_ids) * size):
            raise ValueError(
                f"sequence {seq_id}: {num_computed_tokens} tokens computed, {len(token_ids)} given,"
                f" {len(table.block_ids)} blocks of {size} held"
            )
        for index in range(table.num_full, num_computed_tokens // size):
            parent = table.block_ids[index - 1] if index else None
            content = tuple(token_ids[index * size : (index + 1) * size])
            self._pool.fill(table.block_ids[index], parent, content, table.salt)
            table.num_full = index + 1

    def fork(self, parent_seq_id: int, child_seq_id: int, num_tokens: int | None = None) -> None:
        """Give a new sequence the block table of another, every block shared. Costs no block.

        ``num_tokens``: only the blocks of the first so many tokens; the child will write what comes after them.
        Before either of them writes, ``allocate`` must be called for it; a shared block that is not full, or that the
        child writes into, is copied then. Raises ``KeyError`` when the parent has no table, ``ValueError`` when the
        child has one already or the parent's is too short.
        """
        self._check_new(child_seq_id)
        parent = self._tables[parent_seq_id]
        block_ids, num_full = list(parent.block_ids), parent.num_full
        if num_tokens is not None:
            count = self.blocks_needed(num_tokens)
            if count > len(block_ids):
                raise ValueError(f"sequence {parent_seq_id} holds {len(block_ids)} blocks, not {count}")
            block_ids, num_full = block_ids[:count], min(num_full, num_tokens // self._block_size)
        self._pool.share(block_ids)
        self._tables[child_seq_id] = BlockTable(block_ids, num_full, parent.salt)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (source block, target block) that ``allocate`` has called for since the last call.

        They belong to the next plan: make them in this order, and before anything of that plan is written. All of them,
        even when the sequence has left since: a later copy may read the target of an earlier one.
        """
        copies, self._copies = tuple(self._copies), []
        return copies

    def free(self, seq_id: int) -> None:
        """Give back every block of a sequence. Shared ones stay until their last reference is gone.

        Raises ``KeyError`` when it holds none, so that nothing is freed twice.
        """
        self._pool.release(self._tables.pop(seq_id).block_ids)

    # ---- host memory

    @property
    def num_swapped(self) -> int:
        """Sequences whose K/V is kept in host memory."""
        return self._swap_space.num_sequences

    def swap_out(self, seq_id: int, num_tokens: int) -> bool:
        """Keep the first ``num_tokens`` tokens of a sequence in host memory; ``free`` it next.

        All or nothing: False when too few host blocks are free, or when copies or swaps into blocks are called for
        already: what goes out goes first.
        """
        block_ids = self._tables[seq_id].block_ids[: self.blocks_needed(num_tokens)]
        return not self._copies and self._swap_space.put(seq_id, block_ids, num_tokens)

    def swap_in(self, seq_id: int) -> int:
        """Bring what was swapped out of a sequence back into its new block table, but for what ``begin`` has shared.

        Returns the number of tokens whose K/V the table then holds; 0 when nothing of the sequence was kept, or when it
        would come into a block of a copy that is called for: then it is forgotten.
        """
        table = self._tables[seq_id]
        if self._copies and not {b for pair in self._copies for b in pair}.isdisjoint(
            table.block_ids[table.num_full :]
        ):
            self._swap_space.drop(seq_id)
        return self._swap_space.take(seq_id, table.block_ids, table.num_full)

    def drop_swapped(self, seq_id: int) -> None:
        """Forget what was swapped out of a sequence, if anything was."""
        self._swap_space.drop(seq_id)

    def take_swaps(self) -> Swaps:
        """The copies between device and host that were called for since the last call, for the next plan: first all
        that goes out, then all that comes back, then those of ``take_copies``, then what the plan writes."""
        return self._swap_space.take_swaps()

    # ---- declared prefixes

    def pin(self, token_ids: Sequence[int], salt: str = "") -> PinnedPrefix:
        """Keep the full blocks of a prefix, and match them even with ``prefix_cache=False``, until ``unpin``.

        They must be cached: run a sequence over the prefix, ``commit``, ``pin``, and ``free`` the sequence only then.
        Raises ``LookupError`` and changes nothing when one is missing. A prefix may be pinned more than once.
        """
        block_ids = tuple(self._pool.find(token_ids, salt))
        self._pool.pin(block_ids)
        pin = PinnedPrefix(self._next_prefix_id, len(block_ids) * self._block_size, block_ids, salt)
        self._next_prefix_id += 1
        self._pins[pin.prefix_id] = pin
        return pin

    def unpin(self, pin: PinnedPrefix) -> None:
        """Let a pinned prefix go. Sequences that use it keep it. Raises ``KeyError`` when it is not pinned."""
        del self._pins[pin.prefix_id]
        self._pool.unpin(pin.block_ids)

    # ---- checks

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        self._pool.check_integrity()
        self._swap_space.check_integrity()
        blocks = range(self.num_blocks + 1)
        pins = Counter(block_id for pin in self._pins.values() for block_id in pin.block_ids)
        held = pins + Counter(block_id for table in self._tables.values() for block_id in table.block_ids)
        assert all(self._pool.ref_count(b) == held[b] for b in blocks), f"references differ from holders: {held}"
        assert all(self._pool.num_pins(b) == pins[b] for b in pins), f"pins differ from pinned prefixes: {pins}"
        for table in self._tables.values():
            assert table.num_full <= len(table.block_ids), f"{table!r} has more full blocks than blocks"
            self._pool.check_chain(table.block_ids[: table.num_full], table.salt)
        for pin in self._pins.values():
            self._pool.check_chain(pin.block_ids, pin.salt)

    def __repr__(self) -> str:
        used, s = self.num_blocks - self.num_free_blocks, self.statistics()
        return (
            f"<PagedKVManager blocks={used}/{s.num_blocks} cached={s.num_cached_blocks}"
            f" pinned={s.num_pinned_blocks} sequences={s.num_sequences}>"
        )

    # ---- inside

    def _check_new(self, seq_id: int) -> None:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} has a block table already")

    def _num_pinned_blocks(self) -> int:
        return len({block_id for pin in self._pins.values() for block_id in pin.block_ids})

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        source, target = table.block_ids[index], self._pool.take(1)[0]
        table.block_ids[index] = target
        self._pool.release((source,))
        self._copies.append((source, target))
        self._num_copies += 1
