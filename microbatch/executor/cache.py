"""The cache that ``model.generate`` is given: a face of the paged store, which holds no K/V of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from microbatch.executor.attention import PagedStep, hand_over


class PagedLayer(CacheLayerMixin):
    """One layer's length, counted as transformers counts it: columns of the attention mask consumed, padding
    included."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to make: the store exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the columns; the attention function stores the states."""
        self.length += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the key axis of a mask, should a model ask."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Columns consumed."""
        return self.length

    def get_max_length(self) -> int:
        """No bound of its own."""
        return -1


class PagedCache(Cache):
    """Hands the current ``PagedStep`` to the attention function through the keywords of each attention call, or on the
    keys where a module does not show its keywords (gpt_neox)."""

    def __init__(self, num_layers: int, prefix_columns: int) -> None:
        self.lengths = [PagedLayer(prefix_columns) for _ in range(num_layers)]
        super().__init__(layers=list(self.lengths))
        self.step: PagedStep | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **other: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention module before its attention function."""
        if kwargs is None:  # older modules keep their keywords to themselves
            hand_over(key_states, self.step)
        else:
            kwargs["paged"] = self.step
        return self.lengths[layer_idx].update(key_states, value_states)

    def count(self, layer_idx: int, columns: int) -> None:
        """A layer has stored these columns by itself: all that is left of ``update``."""
        self.lengths[layer_idx].length += columns


class DenseCache(PagedCache):
    """For models whose attention cannot be replaced: their own attention over a dense copy gathered from the store.

    ``slots`` int64 ``[B, columns]`` gives the slot of every column of the attention mask consumed so far, slot 0 (null
    block) for padding; the executor extends it before each forward.
    """

    slots: torch.Tensor

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states ``[B, KVH, S, D]``, return the whole context ``[B, KVH, columns, D]``."""
        step = self.step
        assert step is not None
        inputs = step.inputs.to(key_states.device)
        kv = step.store.kv[layer_idx]
        kv.write(step.pack(key_states), step.pack(value_states), inputs.slot_mapping)
        self.lengths[layer_idx].update(key_states, value_states)
        step.num_calls += 1
        slots = self.slots.to(key_states.device)
        keys, values = kv.gather_slots(slots)
        return keys.transpose(1, 2), values.transpose(1, 2)
