"""A store of one number's worth of K/V a slot, for tests: each slot holds the whole text it was computed from.

Real K/V at a position depends on every token up to it, so a wrong shared, evicted or overwritten block shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.metadata import slot_mapping

Context = tuple[str, tuple[int, ...]]


class ToyStore:
    """Slots by number; ``read`` asserts that they hold what the sequence would have computed itself."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, Context] = {}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in order."""
        for source, target in pairs:
            for offset in range(self.block_size):
                content = self.slots.get(source * self.block_size + offset)
                if content is not None:
                    self.slots[target * self.block_size + offset] = content

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int, stop: int, salt: str) -> None:
        """Compute positions [start, stop) of a text."""
        for position, slot in enumerate(slot_mapping(block_ids, start, stop - start, self.block_size), start):
            self.slots[slot] = (salt, tuple(token_ids[: position + 1]))

    def read(self, block_ids: Sequence[int], token_ids: Sequence[int], stop: int, salt: str) -> None:
        """Assert that positions [0, stop) are those of this text."""
        for position, slot in enumerate(slot_mapping(block_ids, 0, stop, self.block_size)):
            assert self.slots.get(slot) == (salt, tuple(token_ids[: position + 1])), f"position {position} is wrong"


class ToyEngine:
    """Runs whole sequences over a manager and a toy store, checking what is read and the books after every call."""

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_cache: bool = True) -> None:
        self.kv = PagedKVManager(num_blocks, block_size, prefix_cache=prefix_cache)
        self.store = ToyStore(block_size)
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.salts: dict[int, str] = {}

    def begin(self, seq_id: int, token_ids: Sequence[int], salt: str = "") -> int:
        """Begin a sequence, compute its prompt, and return the number of cached tokens."""
        cached = self.kv.begin(seq_id, token_ids, len(token_ids), salt)
        assert cached is not None, "out of blocks"
        self.texts[seq_id], self.computed[seq_id], self.salts[seq_id] = list(token_ids), cached, salt
        self._compute(seq_id)
        return cached

    def fork(self, parent: int, child: int) -> None:
        """Fork a sequence."""
        self.kv.fork(parent, child)
        self.texts[child] = list(self.texts[parent])
        self.computed[child], self.salts[child] = self.computed[parent], self.salts[parent]

    def extend(self, seq_id: int, token_id: int) -> tuple[tuple[int, int], ...]:
        """Decode one token; the copies that were made for it."""
        self.texts[seq_id].append(token_id)
        assert self.kv.allocate(seq_id, len(self.texts[seq_id])), "out of blocks"
        copies = self.kv.take_copies()
        self.store.copy(copies)
        self._compute(seq_id)
        return copies

    def free(self, seq_id: int) -> None:
        """End a sequence."""
        self.kv.free(seq_id)
        self.kv.check_integrity()

    def run(self, seq_id: int, token_ids: Sequence[int], salt: str = "") -> int:
        """Begin, compute, decode one token and end; the number of cached tokens."""
        cached = self.begin(seq_id, token_ids, salt)
        self.extend(seq_id, 0)
        self.free(seq_id)
        return cached

    def _compute(self, seq_id: int) -> None:
        text, table, salt = self.texts[seq_id], self.kv.block_ids(seq_id), self.salts[seq_id]
        self.store.write(table, text, self.computed[seq_id], len(text), salt)
        self.store.read(table, text, len(text), salt)
        self.computed[seq_id] = len(text)
        self.kv.commit(seq_id, text, len(text))
        self.kv.check_integrity()
