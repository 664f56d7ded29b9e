"""One layer's K/V: its pools of blocks, written by slot and read by block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from microbatch_kernels.quantized_kv import dequantize, quantize, raw


@dataclass(frozen=True, slots=True)
class LayerKV:
    """``keys`` ``[num_blocks + 1, block_size, num_kv_heads, key_dim]``, ``values`` the same with ``value_dim``.

    Slot ``block_id * block_size + offset`` is one token. Backends take it whole: how the numbers are kept is the
    pool's own business. Kept in 8 bits, they come with ``key_scales`` and ``value_scales`` ``[num_blocks + 1,
    block_size, num_kv_heads]``, one factor a token and head (see ``quantized_kv``), and reading gives
    ``compute_dtype``; a backend that reads the pools itself must multiply, or refuse.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    compute_dtype: torch.dtype = torch.float32

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[2]

    @property
    def pools(self) -> list[torch.Tensor]:
        """Every tensor that is indexed by block."""
        return [p for p in (self.keys, self.values, self.key_scales, self.value_scales) if p is not None]

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K/V of T tokens: ``keys``, ``values`` ``[T, num_kv_heads, ·]``, ``slots`` int64 ``[T]``."""
        _write(self.keys, self.key_scales, keys, slots)
        _write(self.values, self.value_scales, values, slots)

    def gather(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks int64 ``[..., n]``, end to end: ``[..., n * block_size, num_kv_heads, ·]``."""
        keys = self._read(self.keys, self.key_scales, block_ids)
        values = self._read(self.values, self.value_scales, block_ids)
        return keys.flatten(-4, -3), values.flatten(-4, -3)

    def gather_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of single tokens, ``slots`` int64 of any shape: ``[..., num_kv_heads, ·]``."""
        key_scales, value_scales = (s if s is None else s.flatten(0, 1) for s in (self.key_scales, self.value_scales))
        keys = self._read(self.keys.flatten(0, 1), key_scales, slots)
        return keys, self._read(self.values.flatten(0, 1), value_scales, slots)

    def scrub(self, block_ids: torch.Tensor) -> None:
        """Set what is not a number to 0 in the blocks int64 ``[n]``. Of K/V in 8 bits only the scales can be that."""
        scaled = [pool for pool in (self.key_scales, self.value_scales) if pool is not None]
        for pool in scaled or self.pools:
            pool[block_ids] = pool[block_ids].nan_to_num(0.0, 0.0, 0.0)

    def _read(self, pool: torch.Tensor, scales: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
        if scales is None:
            return pool[index]
        return dequantize(raw(pool)[index].view(pool.dtype), scales[index], self.compute_dtype)


def _write(pool: torch.Tensor, scales: torch.Tensor | None, states: torch.Tensor, slots: torch.Tensor) -> None:
    if scales is not None:
        states, factors = quantize(states, pool.dtype)
        scales.flatten(0, 1).index_copy_(0, slots, factors)
    raw(pool).flatten(0, 1).index_copy_(0, slots, raw(states))
