"""Attention backends by name. One that is asked for by name is used or fails; only ``auto`` chooses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.layer_kv import LayerKV

logger = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """The one signature of every backend; see ``attention_naive`` for shapes."""

    def __call__(
        self,
        query: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        options: AttentionOptions,
    ) -> torch.Tensor: ...


#: Stores keys and values of new tokens by slot, as ``LayerKV.write`` does.
Writer = Callable[[LayerKV, torch.Tensor, torch.Tensor, torch.Tensor], None]

BACKENDS: Final[Mapping[str, AttentionBackend]] = {"naive": attention_naive, "torch": attention_torch}
#: Imported only where it is wanted: triton is an optional package.
TRITON: Final = "triton"
_TRITON_MODULE: Final = "microbatch_kernels.attention_triton"
_CPU: Final = torch.device("cpu")


def choose_backend(name: str = "auto", device: torch.device = _CPU) -> tuple[str, AttentionBackend]:
    """The name that was chosen, and the backend, for K/V on ``device``.

    ``auto`` takes triton on a GPU, and where it does not run there says so and takes torch. ``ValueError`` for an
    unknown name, with the known ones, and for a backend that cannot run.
    """
    if name == TRITON:
        return name, _load_triton(device)
    if name == "auto":
        if device.type == "cuda":
            try:
                return TRITON, _load_triton(device)
            except ValueError as error:
                logger.warning("%s; using torch", error)
        name = "torch"
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(sorted([*BACKENDS, TRITON]))}")
    return name, BACKENDS[name]


def writer_of(backend: AttentionBackend) -> Writer:
    """How to store K/V for ``backend``."""
    if not reads_on_device(backend):
        return LayerKV.write
    write: Writer = _triton().write_triton
    return write


def reads_on_device(backend: AttentionBackend) -> bool:
    """Whether a decode step of ``backend`` depends on tensors alone, never on ints of the host: what a CUDA graph
    needs. It then skips tokens with a negative slot and rows without a context."""
    module = _triton()
    return module is not None and backend is module.attention_triton


def _load_triton(device: torch.device) -> AttentionBackend:
    try:
        from microbatch_kernels import attention_triton
    except ImportError as error:
        raise ValueError(
            f"attention backend 'triton' lacks a package ({error}); pip install 'microbatch[gpu]' brings it"
        ) from None
    problem = attention_triton.problem(device)
    if problem is not None:
        raise ValueError(f"attention backend 'triton' does not run: {problem}")
    return attention_triton.attention_triton


def _triton() -> Any:
    """The module of the kernels, if it has been imported."""
    return sys.modules.get(_TRITON_MODULE)
