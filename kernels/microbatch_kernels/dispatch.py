"""Attention backends by name. One that is asked for by name is used or fails; only ``auto`` chooses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import torch

from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_cpu import CpuAttention
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.cpu_library import CompileError, cpu_library

logger = logging.getLogger(__name__)

#: Every name that can be asked for.
NAMES: Final = ("auto", "naive", "torch", "cpu", "triton")
_CPU: Final = torch.device("cpu")


def choose_backend(name: str = "auto", device: torch.device = _CPU, *, folder: Path | None = None) -> AttentionBackend:
    """The backend of that name for K/V on ``device``.

    ``auto`` takes Triton on a GPU and C on a CPU, and where that cannot be had says so and takes torch operators.
    ``folder``: where compiled kernels for a CPU are kept; without one ``auto`` compiles nothing. ``ValueError`` for an
    unknown name, with the known ones, and for a backend that cannot be had here.
    """
    if name not in NAMES:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(NAMES)}")
    if name == "naive":
        return AttentionBackend(name, attention_naive)
    if name in ("cpu", "triton"):
        return _load_cpu(folder) if name == "cpu" else _load_triton(device)
    if name == "auto":
        try:
            if device.type == "cuda":
                return _load_triton(device)
            if device.type == "cpu" and folder is not None:
                return _load_cpu(folder)
        except ValueError as error:
            logger.warning("%s; torch operators serve instead, more slowly", error)
    return AttentionBackend("torch", attention_torch)


def _load_cpu(folder: Path | None) -> AttentionBackend:
    try:
        if folder is None:
            raise CompileError("no folder for compiled kernels was given")
        attention = CpuAttention(cpu_library(folder))
    except CompileError as error:
        raise ValueError(f"attention backend 'cpu' cannot be had: {error}") from None
    return AttentionBackend("cpu", attention, attention.write)


def _load_triton(device: torch.device) -> AttentionBackend:
    """Imported only where it is wanted: triton is an optional package."""
    try:
        from microbatch_kernels import attention_triton
    except ImportError as error:
        raise ValueError(
            f"attention backend 'triton' lacks a package ({error}); pip install 'microbatch[gpu]' brings it"
        ) from None
    problem = attention_triton.problem(device)
    if problem is not None:
        raise ValueError(f"attention backend 'triton' does not run: {problem}")
    return AttentionBackend(
        "triton", attention_triton.attention_triton, attention_triton.write_triton, reads_on_device=True
    )
