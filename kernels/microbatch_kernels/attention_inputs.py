"""What an attention backend must know of a packed batch, as ints and as tensors on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from microbatch_kernels.metadata import PackedMetadata


@dataclass(slots=True)
class AttentionInputs:
    """A packed batch of B sequences with T query tokens in all.

    ``query_lens`` and ``context_lens`` (ints, ``[B]``): sequence b has ``query_lens[b]`` new tokens, the last of its
    ``context_lens[b]`` tokens. ``block_tables`` int64 ``[B, max_blocks]``, rows padded with the null block 0.
    ``slot_mapping`` int64 ``[T]``: where each new token's K/V is stored. For backends that read everything on the
    device, int64 too: ``lens`` ``[B]``, the context lengths; ``query_starts`` ``[B + 1]``, where each sequence begins
    among the new tokens; ``decode_rows``, the sequences with one new token. Made once a step and shared by all layers;
    ``masks`` and ``tile_lists`` keep what backends derive from it.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    lens: torch.Tensor
    query_starts: torch.Tensor
    decode_rows: torch.Tensor
    masks: dict[tuple[str, int, int | None], torch.Tensor] = field(default_factory=dict)
    tile_lists: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls, rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device
    ) -> AttentionInputs:
        """From (block_ids, start, count) of each sequence, as ``PackedMetadata.build`` takes them. One upload."""
        packed = PackedMetadata.build(rows, block_size)
        width = len(packed.block_tables[0]) if rows else 0
        parts = (
            *packed.block_tables,
            packed.slot_mapping,
            packed.context_lens,
            packed.cu_seqlens_q,
            [row for row, new in enumerate(packed.query_lens) if new == 1],
        )
        everything = upload(chain.from_iterable(parts), device)
        sizes = [width * len(rows), *map(len, parts[len(rows) :])]
        tables, slots, lens, starts, decode_rows = torch.split(everything, sizes)
        tables = tables.view(len(rows), width)
        return cls(tuple(packed.query_lens), tuple(packed.context_lens), tables, slots, lens, starts, decode_rows)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return len(self.slot_mapping) == len(self.query_lens)

    def tiles(self, size: int) -> torch.Tensor:
        """The sequences with several new tokens in tiles of at most ``size`` of them: int64 ``[n, 2]``, each its
        sequence and its first new token in there. Those with the longest context first, as they take longest."""
        if size not in self.tile_lists:
            found = [
                (row, first) for row, new in enumerate(self.query_lens) if new > 1 for first in range(0, new, size)
            ]
            found.sort(key=lambda tile: self.query_lens[tile[0]] - self.context_lens[tile[0]] - tile[1])
            self.tile_lists[size] = upload(chain.from_iterable(found), self.slot_mapping.device).view(-1, 2)
        return self.tile_lists[size]

    def to(self, device: torch.device) -> AttentionInputs:
        """The same batch with its tensors on another device (layers of one model may lie on several)."""
        if self.slot_mapping.device == device:
            return self
        names = ("block_tables", "slot_mapping", "lens", "query_starts", "decode_rows")
        moved = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved, masks={}, tile_lists={})


def upload(values: Iterable[int], device: torch.device) -> torch.Tensor:
    """``values`` as an int64 tensor on ``device``, without waiting for what the device is doing."""
    ints = array("q", values)  # several times faster than torch's own reading of a list
    tensor = torch.frombuffer(ints, dtype=torch.int64) if ints else torch.empty(0, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. ``sliding_window`` w: position p sees keys j with p - w < j <= p. ``softcap`` s: scores are
    s * tanh(score / s). ``sinks`` ``[num_heads]``: one extra logit a head that takes weight and gives no value."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
