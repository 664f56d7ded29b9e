"""The small steps of a layer in C, float32: see ``csrc/layer.c``."""

from __future__ import annotations

import ctypes

import torch


class CpuLayer:
    """Norm and rotary positions over a built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = library.microbatch_rms_norm
        self._norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]
        self._norm.restype = None
        self._rotate = library.microbatch_rotate
        self._rotate.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
        self._rotate.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension; ``x`` and ``weight`` float32."""
        x = x.contiguous()
        y = torch.empty_like(x)
        dim = x.shape[-1]
        self._norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // dim, dim, eps)
        return y

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> None:
        """Rotary positions in place, the halves of a head paired.

        ``x`` ``[T, width]`` contiguous with ``heads`` heads at its front; ``cosines``, ``sines`` ``[T, head_dim]``.
        """
        tokens, dim = cosines.shape
        self._rotate(x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), tokens, x.shape[1], heads, dim)
