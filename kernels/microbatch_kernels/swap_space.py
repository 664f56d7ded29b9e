"""The ledger of host memory: which host block holds which block of a sequence that had to leave the device."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

#: (source, target) of each block to be copied.
Pairs = tuple[tuple[int, int], ...]


class HostTable(NamedTuple):
    """Where the first ``num_tokens`` tokens of a sequence are, block by block."""

    block_ids: list[int]
    num_tokens: int


class Swaps(NamedTuple):
    """Copies between device and host. All of ``out`` goes before any of ``back``."""

    #: (device block, host block)
    out: Pairs
    #: (host block, device block)
    back: Pairs


class SwapSpace:
    """Host blocks 0 to ``num_blocks`` - 1. The lowest free ones are taken, so that what is copied lies together."""

    def __init__(self, num_blocks: int = 0) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._tables: dict[int, HostTable] = {}
        self._out: dict[int, int] = {}  # device block by host block
        self._back: dict[int, int] = {}  # host block by device block

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    @property
    def num_sequences(self) -> int:
        """Sequences that wait in host memory."""
        return len(self._tables)

    def put(self, seq_id: int, block_ids: Sequence[int], num_tokens: int) -> bool:
        """Take the device blocks that hold ``num_tokens`` tokens to host blocks. False, and nothing changes, when there
        are not enough, or when something comes back already.

        ``ValueError`` when the sequence is here already.
        """
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} is in host memory already")
        if len(block_ids) > len(self._free) or self._back:
            return False
        host_ids = [heappop(self._free) for _ in block_ids]
        self._tables[seq_id] = HostTable(host_ids, num_tokens)
        self._out.update(zip(host_ids, block_ids, strict=True))
        return True

    def take(self, seq_id: int, block_ids: Sequence[int], num_full: int) -> int:
        """Bring a sequence back into a block table whose first ``num_full`` blocks hold their content already.

        Its host blocks are free then. Returns the tokens that were here, 0 when the sequence is not; ``ValueError``
        when the table is too short for them.
        """
        table = self._tables.get(seq_id)
        if table is None:
            return 0
        if len(block_ids) < len(table.block_ids):
            raise ValueError(f"sequence {seq_id}: {len(table.block_ids)} blocks do not fit into {len(block_ids)}")
        pairs = list(zip(block_ids, table.block_ids, strict=False))
        self._back.update(pairs[num_full:])
        self.drop(seq_id)
        return table.num_tokens

    def drop(self, seq_id: int) -> None:
        """Forget a sequence, if it is here, and free its host blocks."""
        table = self._tables.pop(seq_id, None)
        for block_id in () if table is None else table.block_ids:
            heappush(self._free, block_id)

    def take_swaps(self) -> Swaps:
        """The copies called for since the last call."""
        out = tuple([(device, host) for host, device in self._out.items()])
        back = tuple([(host, device) for device, host in self._back.items()])
        self._out, self._back = {}, {}
        return Swaps(out, back)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every host block is free or held once."""
        held = [block_id for table in self._tables.values() for block_id in table.block_ids]
        assert sorted(held + self._free) == list(range(self.num_blocks)), f"host blocks: {held} held, {self._free} free"
        assert all(self._free[(i - 1) // 2] <= block_id for i, block_id in enumerate(self._free) if i), "not a heap"

    def __repr__(self) -> str:
        return f"<SwapSpace free={self.num_free}/{self.num_blocks} sequences={self.num_sequences}>"
