"""Our attention as transformers sees it: packs the valid rows, writes their K/V to the store, attends over the pages.

Registered under one name with ``AttentionInterface`` and on purpose without a mask function: transformers then builds
no mask (masking_utils), and the layout of the batch comes from the ``PagedStep`` that travels in the attention
keywords.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AttentionInterface

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.dispatch import AttentionBackend, writer_of
from microbatch_kernels.store import KVStore

ATTENTION_NAME: Final = "microbatch_paged"


@dataclass(slots=True)
class PagedStep:
    """One forward over the store. ``packed`` int64 ``[T]`` names the valid tokens among the B x S of a padded batch, in
    row order; None when all are valid. ``num_calls`` counts the attention layers that ran over it."""

    store: KVStore
    backend: AttentionBackend
    inputs: AttentionInputs
    packed: torch.Tensor | None
    num_calls: int = 0

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, heads, S, dim]`` to ``[T, heads, dim]``."""
        rows = states.transpose(1, 2).flatten(0, 1)
        return rows if self.packed is None else rows[self.packed.to(rows.device)]

    def unpack(self, rows: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """``[T, heads, dim]`` to ``[B, S, heads, dim]``, zero where padding was."""
        if self.packed is not None:
            full = rows.new_zeros(batch * length, *rows.shape[1:])
            rows = full.index_copy_(0, self.packed.to(rows.device), rows)
        return rows.view(batch, length, *rows.shape[1:])


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The signature of transformers' attention functions: ``query`` ``[B, H, S, D]``, result ``[B, S, H, D]``."""
    if paged is None:
        raise RuntimeError("paged attention was called without a PagedStep: this model does not pass its keywords on")
    batch, _, length, dim = query.shape
    layer: int = module.layer_idx  # type: ignore[assignment]
    inputs = paged.inputs.to(query.device)
    kv = paged.store.kv[layer]
    writer_of(paged.backend)(kv, paged.pack(key), paged.pack(value), inputs.slot_mapping)
    options = AttentionOptions(dim**-0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    out = paged.backend(paged.pack(query), kv, inputs, options)
    paged.num_calls += 1
    return paged.unpack(out, batch, length), None


def register() -> None:
    """Make the name known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
