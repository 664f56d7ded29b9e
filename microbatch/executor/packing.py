"""A model's linear layers put over the C kernel for CPUs: their weights packed, the originals let go."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from microbatch_kernels.packed_weight import PackedWeight


class PackedLinear(nn.Module):
    """In the place of ``nn.Linear``."""

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias
        self.out_features, self.in_features = packed.num_columns, packed.panels.shape[1]

    @property
    def weight(self) -> torch.Tensor:
        """The weight unpacked, ``[out_features, in_features]``: for whoever looks at it, at the cost of a copy."""
        return self.packed.unpack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., in_features]`` to ``[..., out_features]``."""
        return self.packed.linear(x, self.bias)

    def extra_repr(self) -> str:
        """Beside the class's name."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.packed.panels.dtype}"


class PackedEmbedding(nn.Module):
    """In the place of an ``nn.Embedding`` that shares its weight with the head: one copy serves both."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed
        self.num_embeddings, self.embedding_dim = packed.num_columns, packed.panels.shape[1]

    @property
    def weight(self) -> torch.Tensor:
        """The table unpacked, ``[num_embeddings, embedding_dim]``, at the cost of a copy."""
        return self.packed.unpack()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 of any shape to ``[..., embedding_dim]``."""
        return self.packed.rows(token_ids)


def pack_model(model: nn.Module, library: ctypes.CDLL, dtype: torch.dtype = torch.float32) -> int:
    """Replace every plain float32 ``nn.Linear`` on the CPU; the number of those replaced.

    ``dtype``: what weights are kept as, float32, bfloat16 or int8. One layer is packed at a time, so memory never
    holds more than one weight twice.
    """
    embeddings = {m.weight.data_ptr(): (parent, name) for parent, name, m in _children(model, nn.Embedding)}
    count = 0
    for parent, name, linear in list(_children(model, nn.Linear)):
        if linear.weight.dtype != torch.float32 or linear.weight.device.type != "cpu":
            continue
        packed = PackedWeight.pack(library, linear.weight, dtype)
        setattr(parent, name, PackedLinear(packed, None if linear.bias is None else linear.bias.detach()))
        if (tied := embeddings.get(linear.weight.data_ptr())) is not None:
            setattr(*tied, PackedEmbedding(packed))
        count += 1
    return count


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The memory of all packed weights; a weight that two modules share comes twice."""
    packed = [m.packed for m in model.modules() if isinstance(m, PackedLinear | PackedEmbedding)]
    return [tensor for weight in packed for tensor in (weight.panels, weight.scales) if tensor is not None]


def _children(model: nn.Module, kind: type[Any]) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, attribute, module) of exactly this class: a subclass may compute something else."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is kind:
                yield parent, name, child
