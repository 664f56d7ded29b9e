"""What an attention backend must know of a packed batch, as ints and as tensors on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from microbatch_kernels.block_rows import BlockRows
from microbatch_kernels.metadata import cu_seqlens, num_blocks_for, slot_mapping


@dataclass(slots=True)
class AttentionInputs:
    """A packed batch of B sequences with T query tokens in all.

    ``query_lens`` and ``context_lens`` (ints, ``[B]``): sequence b has ``query_lens[b]`` new tokens, the last of its
    ``context_lens[b]`` tokens. ``block_tables`` int64 ``[B, max_blocks]``, rows padded with the null block 0.
    ``slot_mapping`` int64 ``[T]``: where each new token's K/V is stored. For backends that read everything on the
    device, int64 too: ``lens`` ``[B]``, the context lengths; ``query_starts`` ``[B + 1]``, where each sequence begins
    among the new tokens; ``decode_rows``, the sequences with one new token. Rows of ``block_tables`` may lie apart.
    Made once a step and shared by all layers; ``masks`` and ``tile_lists`` keep what backends derive from it.
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
        cls,
        rows: Sequence[tuple[Sequence[int], int, int]],
        block_size: int,
        device: torch.device,
        block_rows: BlockRows | None = None,
    ) -> AttentionInputs:
        """From (block_ids, start, count) of each sequence: ``count`` >= 1 new tokens at positions from ``start``.

        A block table may be longer than its context; ``ValueError`` when it is too short or a row is empty. With
        ``block_rows`` the batch is good until the next one is made with them.
        """
        query_lens = tuple([count for _, _, count in rows])
        if min(query_lens, default=1) < 1:
            raise ValueError("every sequence of a packed batch has at least one new token")
        context_lens = tuple([start + count for _, start, count in rows])
        slots = list(chain.from_iterable([slot_mapping(ids, start, new, block_size) for ids, start, new in rows]))
        decode_rows = [row for row, new in enumerate(query_lens) if new == 1]
        ints = upload(chain(slots, context_lens, cu_seqlens(query_lens), decode_rows), device)
        sizes = [len(slots), len(rows), len(rows) + 1, len(decode_rows)]
        slot_tensor, lens, starts, decodes = torch.split(ints, sizes)
        width = num_blocks_for(max(context_lens, default=0), block_size)
        tables = (block_rows or BlockRows()).fill([ids for ids, _, _ in rows], width)
        return cls(query_lens, context_lens, _to(tables, device), slot_tensor, lens, starts, decodes)

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
    return _to(torch.frombuffer(ints, dtype=torch.int64) if ints else torch.empty(0, dtype=torch.int64), device)


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. ``sliding_window`` w: position p sees keys j with p - w < j <= p. ``softcap`` s: scores are
    s * tanh(score / s). ``sinks`` ``[num_heads]``: one extra logit a head that takes weight and gives no value."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
