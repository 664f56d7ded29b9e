"""The C kernels put under a model on a CPU: packed linear layers and fused parts of layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from microbatch.executor.fused import fuse_model
from microbatch.executor.packing import pack_model
from microbatch_kernels.cpu_layer import CpuLayer
from microbatch_kernels.cpu_library import cpu_library

logger = logging.getLogger(__name__)

#: What weights may be kept as, by the name in the settings.
WEIGHT_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """``folder``: where the built library is kept. ``weights``: what linear layers keep their weights as; activations
    and sums are float32 in any case."""

    folder: Path
    weights: torch.dtype = torch.float32

    @torch.no_grad()
    def put_under(self, model: nn.Module) -> None:
        """Pack and fuse what fits, in place. The library must have been built (``CompileError`` otherwise)."""
        library = cpu_library(self.folder)
        count = pack_model(model, library, self.weights)
        fuse_model(model, CpuLayer(library))
        logger.info("C kernels: %d linear layers packed, weights %s", count, str(self.weights).removeprefix("torch."))
