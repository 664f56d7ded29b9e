"""Packages that only some models need: asked for by name before any download or load. Imports none of them."""

from __future__ import annotations

import importlib.util

from microbatch.errors import SetupError


def require_gguf() -> None:
    """``SetupError`` when the package that reads GGUF is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise SetupError("reading a GGUF file needs the package gguf: pip install gguf")


def require_quantization(quantization: str) -> None:
    """``SetupError`` when a package that loading with ``quantization`` needs is not installed."""
    needed = ["accelerate"] + (["bitsandbytes"] if quantization in ("int8", "int4") else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        what = "loading a model" if missing[0] == "accelerate" else f"quantization {quantization}"
        raise SetupError(f"{what} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
