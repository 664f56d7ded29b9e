"""Attention backends by name. One that is asked for by name is used or fails; only ``auto`` chooses."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_cpu import CpuAttention
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.cpu_library import CompileError, cpu_library

logger = logging.getLogger(__name__)

#: Every name that can be asked for.
NAMES = ("auto", "naive", "torch", "cpu")


def choose_backend(
    name: str = "auto", *, device: torch.device = torch.device("cpu"), folder: Path | None = None
) -> AttentionBackend:
    """The backend of that name; ``auto``: C on a CPU, torch operators elsewhere or where C cannot be built.

    ``folder``: where compiled kernels are kept; without one ``auto`` compiles nothing. ``ValueError`` says what is
    wrong with a name, or why its backend cannot be had here.
    """
    if name not in NAMES:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(NAMES)}")
    if name == "naive":
        return AttentionBackend("naive", attention_naive)
    if name == "cpu" or (name == "auto" and device.type == "cpu" and folder is not None):
        backend = _cpu_backend(name, folder)
        if backend is not None:
            return backend
    return AttentionBackend("torch", attention_torch)


def _cpu_backend(name: str, folder: Path | None) -> AttentionBackend | None:
    try:
        if folder is None:
            raise CompileError("no folder for compiled kernels was given")
        attention = CpuAttention(cpu_library(folder))
    except CompileError as error:
        if name == "cpu":
            raise ValueError(f"attention backend 'cpu' cannot be had: {error}") from None
        logger.warning("no C kernels, torch operators serve instead, at about half the speed: %s", error)
        return None
    return AttentionBackend("cpu", attention, attention.write)
