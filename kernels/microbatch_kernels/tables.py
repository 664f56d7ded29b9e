"""Who holds blocks: a sequence by its block table, a declared prefix by its pin."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A declared prefix whose blocks stay until it is unpinned. ``num_tokens`` counts its full blocks only."""

    prefix_id: int
    num_tokens: int
    block_ids: tuple[int, ...]
    salt: str


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence. The first ``num_full`` are written and committed: they never change again."""

    block_ids: list[int]
    num_full: int
    salt: str
