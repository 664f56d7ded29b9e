"""K/V in 8 bits: every token and head has a scale of its own, so what is stored of a token depends on it alone.

A stored number times its scale is the number again. ``int8`` cuts the range of a head into 254 equal steps; ``fp8`` is
``float8_e4m3fn``, whose steps grow with the number. The 8-bit numbers are always finite: a head with NaN or infinity
in it gets a scale that is not finite, so reading it gives NaN and the row fails alone, as it does without quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

SCALE_DTYPE: Final = torch.float32
#: Name of a setting to format of the numbers; None: the model's own, without scales.
STORAGE_DTYPES: Final[Mapping[str, torch.dtype | None]] = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
#: Keeps a head of zeros from a division by zero, and a scale from losing its bits.
_SMALLEST_SCALE: Final = torch.finfo(SCALE_DTYPE).tiny


def storage_dtype(name: str) -> torch.dtype | None:
    """The format that a name means; ``ValueError`` with the known names for another."""
    if name not in STORAGE_DTYPES:
        raise ValueError(f"unknown K/V format {name!r}; known: {', '.join(STORAGE_DTYPES)}")
    return STORAGE_DTYPES[name]


def quantize(states: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``states`` ``[..., dim]`` as numbers of the same shape in ``storage``, and their scales float32 ``[...]``."""
    exact = states.to(SCALE_DTYPE)
    scales = (exact.abs().amax(-1) / _LARGEST[storage]).clamp(min=_SMALLEST_SCALE)
    numbers = (exact / scales[..., None]).nan_to_num(0.0, 0.0, 0.0)
    return (numbers.to(storage) if storage.is_floating_point else numbers.round().to(storage)), scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``numbers`` ``[..., dim]`` times ``scales`` ``[...]``, in ``dtype``."""
    return (numbers.to(SCALE_DTYPE) * scales[..., None]).to(dtype)


def raw(pool: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can index everywhere: for 8-bit floats it lacks some of the operators."""
    return pool.view(torch.uint8) if pool.dtype.is_floating_point and pool.dtype.itemsize == 1 else pool
