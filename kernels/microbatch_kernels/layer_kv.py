"""One layer's K/V: its pools of blocks, written by slot and read by block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """``keys`` ``[num_blocks + 1, block_size, num_kv_heads, key_dim]``, ``values`` the same with ``value_dim``.

    Slot ``block_id * block_size + offset`` is one token. Backends take it whole: how the numbers are kept is the
    pool's own business.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[2]

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K/V of T tokens: ``keys``, ``values`` ``[T, num_kv_heads, ·]``, ``slots`` int64 ``[T]``."""
        self.keys.flatten(0, 1).index_copy_(0, slots, keys)
        self.values.flatten(0, 1).index_copy_(0, slots, values)

    def gather(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks int64 ``[..., n]``, end to end: ``[..., n * block_size, num_kv_heads, ·]``."""
        return self.keys[block_ids].flatten(-4, -3), self.values[block_ids].flatten(-4, -3)

    def gather_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of single tokens, ``slots`` int64 of any shape: ``[..., num_kv_heads, ·]``."""
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]
