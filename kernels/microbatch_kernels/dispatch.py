"""Attention backends by name. One that is asked for by name is used or fails; only ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.layer_kv import LayerKV


class AttentionBackend(Protocol):
    """The one signature of every backend; see ``attention_naive`` for shapes."""

    def __call__(
        self,
        query: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        options: AttentionOptions,
    ) -> torch.Tensor: ...


BACKENDS: Final[Mapping[str, AttentionBackend]] = {"naive": attention_naive, "torch": attention_torch}


def choose_backend(name: str = "auto") -> tuple[str, AttentionBackend]:
    """The name that was chosen, and the backend. An unknown name raises ``ValueError`` with the known ones."""
    chosen = "torch" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(sorted(BACKENDS))}")
    return chosen, BACKENDS[chosen]
