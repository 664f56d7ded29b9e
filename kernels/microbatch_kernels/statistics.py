"""Numbers of the ledger."""

from __future__ import annotations

from typing import NamedTuple


class KVStatistics(NamedTuple):
    """State and history of a manager."""

    #: Blocks that can be handed out.
    num_blocks: int
    #: Blocks that nothing references, cached ones included.
    num_free_blocks: int
    #: Blocks with known content, referenced or not.
    num_cached_blocks: int
    #: Blocks that pinned prefixes hold.
    num_pinned_blocks: int
    #: Sequences that hold a block table.
    num_sequences: int
    #: Cached blocks that were given new content, since the start.
    num_evictions: int
    #: Blocks copied on write, since the start.
    num_copies: int
    #: Blocks of host memory for sequences that are swapped out.
    num_host_blocks: int
    #: Those of them that hold nothing.
    num_free_host_blocks: int
