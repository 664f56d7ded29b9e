"""Our attention as transformers sees it: packs the valid rows, writes their K/V to the store, attends over the pages.

Registered under one name with ``AttentionInterface`` and on purpose without a mask function: transformers then builds
no mask (masking_utils), and the layout of the batch comes from the ``PagedStep`` that travels in the attention
keywords.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import AttentionInterface

from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.store import KVStore

ATTENTION_NAME: Final = "microbatch_paged"
#: Attribute of a tensor of keys that the step travels on where the keywords are out of reach.
_STEP: Final = "microbatch_step"


@dataclass(slots=True)
class PagedStep:
    """One forward over the store. ``packed`` int64 ``[T]`` names the valid tokens among the B x S of a padded batch, in
    row order; None when all are valid. ``num_calls`` counts the attention layers that ran over it, ``windows`` are what
    they asked for."""

    store: KVStore
    backend: AttentionBackend
    inputs: AttentionInputs
    packed: torch.Tensor | None
    num_calls: int = 0
    windows: list[int | None] = field(default_factory=list)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, heads, S, dim]`` to ``[T, heads, dim]``."""
        rows = states.transpose(1, 2).flatten(0, 1)
        return rows if self.packed is None else rows[self.packed.to(rows.device)]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """One layer over packed tokens ``[T, heads, dim]``: their K/V stored, then their attention."""
        inputs, kv = self.inputs.to(query.device), self.store.kv[layer]
        self.backend.write(kv, key, value, inputs.slot_mapping)
        self.note(options)
        return self.backend(query, kv, inputs, options)

    def note(self, options: AttentionOptions) -> None:
        """One more attention layer has run over this step."""
        self.num_calls += 1
        self.windows.append(options.sliding_window)

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
    paged = paged or getattr(key, _STEP, None)
    if paged is None:
        raise RuntimeError("paged attention was called without a PagedStep: this model does not pass its keywords on")
    batch, _, length, dim = query.shape
    layer: int = module.layer_idx  # type: ignore[assignment]
    options = AttentionOptions(dim**-0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    out = paged.attend(layer, paged.pack(query), paged.pack(key), paged.pack(value), options)
    return paged.unpack(out, batch, length), None


def hand_over(key: torch.Tensor, step: PagedStep | None) -> None:
    """Send a step to ``paged_attention`` on the keys that the module is about to call it with."""
    setattr(key, _STEP, step)


def register() -> None:
    """Make the name known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
