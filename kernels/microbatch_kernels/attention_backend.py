"""What executors call: attention over the store and the write before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.layer_kv import LayerKV


class Attend(Protocol):
    """The one signature of attention; see ``attention_naive`` for shapes."""

    def __call__(
        self, query: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, options: AttentionOptions
    ) -> torch.Tensor: ...


class Write(Protocol):
    """The one signature of storing K/V; see ``LayerKV.write``."""

    def __call__(self, kv: LayerKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None: ...


def write_torch(kv: LayerKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K/V with torch operators."""
    kv.write(keys, values, slots)


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Attention and the write before it. Called like its ``attend``.

    ``reads_on_device``: a decode step depends on tensors alone, never on ints of the host, as a CUDA graph needs. It
    then skips tokens with a negative slot and rows without a context.
    """

    name: str
    attend: Attend
    write: Write = write_torch
    reads_on_device: bool = False

    def __call__(
        self, query: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention of packed queries over their paged context."""
        return self.attend(query, kv, inputs, options)
