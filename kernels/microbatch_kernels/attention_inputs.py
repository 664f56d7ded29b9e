"""What an attention backend must know of a packed batch, as ints and as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


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
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> AttentionInputs:
        """From block tables as lists of ids, each long enough for its context."""
        width = max((-(-c // block_size) for c in context_lens), default=0)
        padded = [list(t[:width]) + [0] * (width - len(t)) for t in block_tables]
        slots = [
            table[p // block_size] * block_size + p % block_size
            for table, new, context in zip(block_tables, query_lens, context_lens, strict=True)
            for p in range(context - new, context)
        ]
        return cls(
            tuple(query_lens),
            tuple(context_lens),
            torch.tensor(padded, dtype=torch.int64).view(len(padded), width).to(device),
            torch.tensor(slots, dtype=torch.int64).to(device),
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
