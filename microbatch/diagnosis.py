"""``microbatch check``: what is installed, what the machine has, where models are kept."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from microbatch import __version__
from microbatch.errors import SetupError
from microbatch.executor.embedded import EMBEDDED_NAME, embedded_folder
from microbatch.executor.manifest import check_sizes

_PACKAGES: Final = (
    *("torch", "transformers", "accelerate", "bitsandbytes", "gguf", "safetensors", "tokenizers", "huggingface-hub"),
    *("starlette", "uvicorn", "anyio", "msgspec", "prometheus-client", "typer", "rich", "jinja2"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``ok`` is False for what keeps microbatch from working."""

    name: str
    value: str
    ok: bool = True


def examine(home: Path) -> Iterator[Finding]:
    """All findings, cheap ones first. Imports torch, to see the devices."""
    yield Finding("microbatch", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from (_package(name) for name in _PACKAGES)
    has_pip = importlib.util.find_spec("pip") is not None
    yield Finding("pip", _version("pip") if has_pip else "missing: the embedded model cannot be downloaded")
    yield _home(home)
    yield _embedded(home)
    yield _device()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _package(name: str) -> Finding:
    version = _version(name)
    return Finding(name, version or f"missing: {sys.executable} -m pip install {name}", bool(version))


def _home(home: Path) -> Finding:
    exists = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    if not os.access(exists, os.W_OK):
        return Finding("model folder", f"{home}, cannot be written: set MICROBATCH_HOME to another folder", False)
    return Finding("model folder", f"{home}, {shutil.disk_usage(exists).free / 1e9:.1f} GB free")


def _embedded(home: Path) -> Finding:
    folder = embedded_folder(home)
    if not folder.exists():
        return Finding(
            "embedded model", f"{EMBEDDED_NAME}, not there yet: `microbatch pull` or the first serve gets it"
        )
    try:
        check_sizes(folder)
    except SetupError as error:
        return Finding("embedded model", error.message, False)
    return Finding("embedded model", f"{EMBEDDED_NAME}, in {folder}")


def _device() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken build raises whatever its libraries raised
        return Finding("device", f"torch cannot be imported: {' '.join(str(error).split())}", False)
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        return Finding("device", f"cpu, {torch.get_num_threads()} threads ({why})")
    gpu = torch.cuda.get_device_properties(0)
    return Finding("device", f"cuda, {gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
