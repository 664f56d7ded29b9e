"""The small steps of a layer, and whole layers of Llama and its kin, in C, float32: see ``csrc/layer.c``."""

from __future__ import annotations

import ctypes

import torch

from microbatch_kernels.cpu_structs import Layer, Norm, Rotate


class CpuLayer:
    """Norm, rotary positions and whole layers over a built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = library.microbatch_norm
        self._rotate = library.microbatch_rotate
        self._layer = library.microbatch_layer
        self._norm.restype = self._rotate.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension; ``x`` and ``weight`` float32."""
        x = x.contiguous()
        y = torch.empty_like(x)
        dim = x.shape[-1]
        call = Norm(x.data_ptr(), None, weight.data_ptr(), y.data_ptr(), x.numel() // dim, dim, eps)
        self._norm(ctypes.byref(call))
        return y

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> None:
        """Rotary positions in place, the halves of a head paired.

        ``x`` ``[T, width]`` contiguous with ``heads`` heads at its front; ``cosines``, ``sines`` ``[T, head_dim]``.
        """
        tokens, dim = cosines.shape
        call = Rotate(x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), tokens, x.shape[1], heads, dim)
        self._rotate(ctypes.byref(call))

    def run(self, layer: Layer) -> None:
        """A whole layer. Raises ``torch.OutOfMemoryError`` when there is no memory for attention's list of work."""
        if self._layer(ctypes.byref(layer)):
            raise torch.OutOfMemoryError("no memory for the work list of attention")
