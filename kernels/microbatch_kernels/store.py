"""The K/V tensors: one pool of blocks per layer, written by slot.

Layout, per layer: keys ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``, values the same with their own head
size; kept in 8 bits, a scale for each token and head beside both (``quantized_kv``). Slot ``block_id * block_size +
offset`` is one token. Block 0 is the null block: padding reads it, nothing is stored there.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.quantized_kv import SCALE_DTYPE, storage_dtype


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and place of one layer's K/V. Key and value head sizes may differ. ``dtype`` is the model's; ``storage`` is
    the format of the pools where it is another, with scales."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    storage: torch.dtype | None = None

    def stored_as(self, name: str) -> LayerSpec:
        """The same layer kept in the format of that name: ``auto`` (the model's own), ``fp8`` or ``int8``."""
        return replace(self, storage=storage_dtype(name))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, their scales included."""
        numbers = (self.key_dim + self.value_dim) * (self.storage or self.dtype).itemsize
        scales = 0 if self.storage is None else 2 * SCALE_DTYPE.itemsize
        return self.num_kv_heads * (numbers + scales)


class KVStore:
    """Pools for all layers. ``num_blocks`` counts the blocks that can be handed out; the null block comes on top."""

    def __init__(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv = [self._layer(spec) for spec in layers]

    def _layer(self, spec: LayerSpec) -> LayerKV:
        slots = (self.num_blocks + 1, self.block_size, spec.num_kv_heads)
        dtype = spec.storage or spec.dtype
        keys, values = (zeros((*slots, dim), dtype, spec.device) for dim in (spec.key_dim, spec.value_dim))
        if spec.storage is None:
            return LayerKV(keys, values)
        key_scales, value_scales = (zeros(slots, SCALE_DTYPE, spec.device) for _ in range(2))
        return LayerKV(keys, values, key_scales, value_scales, spec.dtype)

    @property
    def pools(self) -> list[torch.Tensor]:
        """Every tensor that is indexed by block, scales included."""
        return [pool for kv in self.kv for pool in kv.pools]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return sum(spec.bytes_per_token for spec in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * self.bytes_per_token

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Set what is not a number to 0 in these blocks. A masked slot has weight 0, and 0 times NaN is NaN, so the
        next owner of a block would inherit it. Whole numbers stay as they are to the bit, so shared blocks may be
        among them."""
        for kv in self.kv:
            kv.scrub(torch.tensor(list(block_ids), dtype=torch.int64, device=kv.keys.device))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer: copy on write after a fork."""
        for pool in self.pools:
            for source, target in pairs:
                pool[target].copy_(pool[source])

    def __repr__(self) -> str:
        mib = (self.num_blocks + 1) * self.bytes_per_block / 2**20
        return f"<KVStore {len(self.layers)} layers, {self.num_blocks} blocks of {self.block_size}, {mib:.0f} MiB>"


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost memory only where they are written, on a CPU: the pages come from an anonymous mapping.

    They must be zero and not just any bytes: a masked slot has weight 0, and 0 times a stray NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize))
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
