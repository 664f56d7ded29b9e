"""A weight matrix in the form that the C kernel of linear layers streams: see ``csrc/linear.c``."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from microbatch_kernels.cpu_structs import Linear, Weight, pointer

#: The kinds of ``csrc/linear.c``, by the dtype that a weight is kept in.
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """``panels`` ``[ceil(n / width), k, width]`` of a weight ``[n, k]``; int8 has ``scales`` float32 ``[n]``."""

    library: ctypes.CDLL
    panels: torch.Tensor
    num_columns: int
    scales: torch.Tensor | None = None

    @classmethod
    def pack(cls, library: ctypes.CDLL, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> PackedWeight:
        """Of ``weight`` ``[n, k]``, kept as float32, bfloat16, or int8 with one scale a row of it."""
        columns, k = weight.shape
        width = library.microbatch_panel_width()
        scales = None
        if dtype == torch.int8:
            scales = (weight.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            weight = (weight.float() / scales[:, None]).round()
        panels = _large((-(-columns // width), k, width), dtype)
        whole = columns // width
        panels[:whole] = weight[: whole * width].view(whole, width, k).transpose(1, 2).to(dtype)
        if rest := columns - whole * width:
            panels[whole, :, :rest] = weight[whole * width :].T.to(dtype)
        return cls(library, panels, columns, scales)

    @classmethod
    def join(cls, weights: Sequence[PackedWeight]) -> PackedWeight:
        """Several of one ``k`` as one with their columns side by side; all but the last must fill whole panels."""
        if any(weight.num_columns % weight.panels.shape[2] for weight in weights[:-1]):
            raise ValueError("only weights that fill whole panels can be joined")
        first = weights[0]
        panels = _large((sum(len(w.panels) for w in weights), *first.panels.shape[1:]), first.panels.dtype)
        torch.cat([w.panels for w in weights], out=panels)
        scales = None if first.scales is None else torch.cat([w.scales for w in weights if w.scales is not None])
        return cls(first.library, panels, sum(w.num_columns for w in weights), scales)

    def part(self, first: int, num_columns: int) -> PackedWeight:
        """The columns from ``first`` on, without a copy; ``first`` begins a panel."""
        width = self.panels.shape[2]
        if first % width:
            raise ValueError(f"column {first} does not begin a panel of {width}")
        panels = self.panels[first // width : -(-(first + num_columns) // width)]
        scales = None if self.scales is None else self.scales[first : first + num_columns]
        return PackedWeight(self.library, panels, num_columns, scales)

    def unpack(self) -> torch.Tensor:
        """The weight again, float32 ``[n, k]``."""
        weight = self.panels.float().transpose(1, 2).reshape(-1, self.panels.shape[1])[: self.num_columns]
        return weight if self.scales is None else weight * self.scales[:, None]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as an embedding looks them up: ``index`` of any shape, float32 ``[..., k]``.

        ``IndexError`` for one that there is not: it may still lie within the last panel.
        """
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.num_columns:
            raise IndexError(f"rows are 0 to {self.num_columns - 1}, not {int(index.min())} to {int(index.max())}")
        width = self.panels.shape[2]
        found = self.panels[index // width, :, index % width].float()
        return found if self.scales is None else found * self.scales[index][..., None]

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: PackedWeight | None = None
    ) -> torch.Tensor:
        """``x`` float32 ``[..., k]`` times the weight, ``[..., n]``. A row's result is the same in any company.

        ``gate``, of the same shape: the result is times ``silu(x * gate)``, as in the first half of a gated MLP.
        """
        if x.dtype != torch.float32 or {x.shape[-1]} != {w.panels.shape[1] for w in (self, gate or self)}:
            raise ValueError(f"rows of float32 and length {self.panels.shape[1]} fit, not {x.dtype} {list(x.shape)}")
        if gate is not None and (gate.num_columns, gate.panels.dtype) != (self.num_columns, self.panels.dtype):
            raise ValueError(f"a gate of {gate.num_columns} columns in {gate.panels.dtype} does not fit this weight")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.num_columns)
        call = self.call(bias, gate)
        call.x, call.y, call.rows = x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1]
        self.library.microbatch_linear(ctypes.byref(call))
        return y

    def call(self, bias: torch.Tensor | None = None, gate: PackedWeight | None = None) -> Linear:
        """What the kernel is called with, but for ``x``, ``y`` and ``rows``. The tensors must outlive it.

        ``ValueError`` for a bias that is not contiguous float32 ``[n]`` on the CPU: the kernel would read past its end.
        """
        if bias is not None and not self._takes(bias):
            raise ValueError(
                f"a bias of float32 and length {self.num_columns} on the CPU fits,"
                f" not {bias.dtype} {list(bias.shape)} on {bias.device}"
            )
        return Linear(
            weight=self._weight(bias),
            gate=Weight() if gate is None else gate._weight(None),
            k=self.panels.shape[1],
            n=self.num_columns,
            kind=_KINDS[self.panels.dtype],
        )

    def _takes(self, bias: torch.Tensor) -> bool:
        fits = bias.dtype == torch.float32 and bias.device.type == "cpu" and bias.shape == (self.num_columns,)
        return fits and bias.is_contiguous()

    def _weight(self, bias: torch.Tensor | None) -> Weight:
        return Weight(self.panels.data_ptr(), pointer(self.scales), pointer(bias))

    @property
    def num_bytes(self) -> int:
        """Bytes that the weight takes."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


def _large(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on large pages where the system has them: a weight is read from end to end, 4 KiB pages cost misses."""
    count = math.prod(shape)
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
