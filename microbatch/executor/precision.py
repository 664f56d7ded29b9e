"""Which device and which number format: chosen by what the machine has, refused by name when it has not."""

from __future__ import annotations

from typing import Final

import torch

from microbatch.errors import SetupError

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """``auto``: the first GPU, else the CPU. ``cuda`` on a machine without one is a ``SetupError``."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise SetupError(f"device must be auto, cpu or cuda, not {name!r}")
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise SetupError(f"device cuda was asked for, but {built}: use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda", 0)


def choose_dtype(name: str, configured: torch.dtype | None, device: torch.device) -> torch.dtype:
    """``auto``: float32 on a CPU; on a GPU bfloat16 if the model was made in it and the GPU has it, else float16.

    ``configured`` is the model's own format as its config names it.
    """
    if name != "auto" and name not in DTYPES:
        raise SetupError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    if name == "bfloat16" and device.type == "cuda" and not _has_bfloat16():
        raise SetupError("this GPU has no bfloat16: use --dtype float16")
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if configured == torch.bfloat16 and _has_bfloat16() else torch.float16


def _has_bfloat16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
