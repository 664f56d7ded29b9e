"""A loaded model made ready to serve: its attention put over a store, and the store sized."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from microbatch.errors import SetupError
from microbatch.executor.cpu_kernels import CpuKernels
from microbatch.executor.device_memory import DeviceMemory, memory_of
from microbatch.executor.faults import is_out_of_memory
from microbatch.executor.kv_shapes import cached_specs
from microbatch.executor.loading import LoadedModel
from microbatch.executor.memory import PoolWish, pool_blocks, pool_text, size, weight_bytes
from microbatch.executor.probe import attach, layer_specs, probe_logits, store_as
from microbatch.executor.profiling import StepShape, profile_step
from microbatch.executor.run import PagedModel
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore

logger = logging.getLogger(__name__)


def put_over_store(
    loaded: LoadedModel,
    *,
    block_size: int,
    num_blocks: int | None,
    num_tokens: int,
    step: StepShape,
    memory_utilization: float = 0.80,
    attention: str = "auto",
    kernels: CpuKernels | None = None,
    kv_dtype: str = "auto",
) -> tuple[PagedModel, StepShape]:
    """The model with its store, and the largest step that fits beside it: ``step`` unless that is too large.

    ``num_blocks`` None: what memory allows, on a CPU at most what ``num_tokens`` tokens need. ``kernels``: also put its
    layers over the C kernels, on a CPU. ``SetupError`` when the model cannot be served over the store or memory does
    not suffice.
    """
    model = _over_scratch(loaded, block_size, step, attention, kernels, kv_dtype)
    store = model.store
    if num_blocks is None:
        wanted = -(-num_tokens // block_size) if loaded.device.type == "cpu" else None
        wish = PoolWish(memory_utilization, block_size, store.bytes_per_token, wanted)
        num_blocks, step = _size_pool(model, wish, step, memory_of(loaded.device))
    try:
        store = KVStore(store.layers, num_blocks, block_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SetupError(
            f"no memory for {num_blocks} K/V blocks of {size(store.bytes_per_block)}: lower --kv-blocks or"
            " --memory-utilization"
        ) from None
    logger.info("memory: %s", pool_text(store, step.max_len))
    return replace(model, store=store), step


def _over_scratch(
    loaded: LoadedModel, block_size: int, step: StepShape, attention: str, kernels: CpuKernels | None, kv_dtype: str
) -> PagedModel:
    """The model over a store of one block, to be replaced by the real one."""
    model: Any = loaded.model
    # Nothing of the model's own defaults (temperature, penalties, lists of bad words) may act beside our sampling.
    model.generation_config = GenerationConfig()
    try:
        folder = None if kernels is None else kernels.folder
        backend = choose_backend(attention, loaded.device, folder=folder)
    except ValueError as error:
        raise SetupError(str(error)) from None
    specs = layer_specs(model)
    expected = probe_logits(model)
    rounded = loaded.quantization != "none"
    if kernels is not None and backend.name == "cpu" and loaded.dtype == torch.float32 and not rounded:
        kernels.put_under(model)
        rounded = kernels.weights != torch.float32
    paged = attach(model, specs, backend, quantized=rounded, packed=step.packed, expected=expected)
    if not paged and step.packed:
        raise SetupError(
            f"a policy that decides before every step needs a model whose attention can run over the paged store, and"
            f" that of {type(model).__name__} cannot: use --policy window"
        )
    logger.info("attention: %s", f"paged, {backend.name}" if paged else "the model's own, over a dense gather")
    specs = store_as(model, specs if paged else cached_specs(model), backend, kv_dtype, paged=paged)
    store = KVStore(specs, 1, block_size)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    # Never stored and never attended to, so any id will do.
    return PagedModel(model, store, backend, loaded.device, vocab_size, pad_token_id=0, dense=not paged)


def _size_pool(model: PagedModel, wish: PoolWish, step: StepShape, memory: DeviceMemory) -> tuple[int, StepShape]:
    profile = profile_step(model, step, memory)
    weights = weight_bytes(model.model)
    logger.info(
        "memory: weights %s, activations %s in %s (%s)",
        size(weights),
        size(profile.activations),
        profile.step,
        profile.how,
    )
    return pool_blocks(memory, wish, profile, weights), profile.step
