"""What an attention backend must know of a packed batch, as ints and as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from microbatch_kernels.metadata import PackedMetadata


@dataclass(slots=True)
class AttentionInputs:
    """A packed batch of B sequences with T query tokens in all.

    ``query_lens`` and ``context_lens`` (ints, ``[B]``): sequence b has ``query_lens[b]`` new tokens, the last of its
    ``context_lens[b]`` tokens. ``block_tables`` int64 ``[B, max_blocks]``, rows padded with the null block 0.
    ``slot_mapping`` int64 ``[T]``: where each new token's K/V is stored. Made once a step and shared by all layers;
    ``masks`` keeps what a backend derives from it, by device and window.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    masks: dict[tuple[str, int, int | None], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls, rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device
    ) -> AttentionInputs:
        """From (block_ids, start, count) of each sequence, as ``PackedMetadata.build`` takes them."""
        packed = PackedMetadata.build(rows, block_size)
        return cls(
            tuple(packed.query_lens),
            tuple(packed.context_lens),
            torch.tensor(packed.block_tables, dtype=torch.int64).to(device),
            torch.tensor(packed.slot_mapping, dtype=torch.int64).to(device),
        )

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return len(self.slot_mapping) == len(self.query_lens)

    def to(self, device: torch.device) -> AttentionInputs:
        """The same batch with its tensors on another device (layers of one model may lie on several)."""
        if self.slot_mapping.device == device:
            return self
        return AttentionInputs(
            self.query_lens, self.context_lens, self.block_tables.to(device), self.slot_mapping.to(device)
        )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. ``sliding_window`` w: position p sees keys j with p - w < j <= p. ``softcap`` s: scores are
    s * tanh(score / s). ``sinks`` ``[num_heads]``: one extra logit a head that takes weight and gives no value."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
