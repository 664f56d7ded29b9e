"""A loaded model made ready to serve: its attention put over a store, and the store sized."""

from __future__ import annotations

import logging
from typing import Any

from transformers import GenerationConfig

from microbatch.errors import SetupError
from microbatch.executor.loading import LoadedModel
from microbatch.executor.memory import default_num_blocks
from microbatch.executor.probe import attach, layer_specs
from microbatch.executor.run import PagedModel
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore

logger = logging.getLogger(__name__)


def put_over_store(
    loaded: LoadedModel, *, block_size: int, num_blocks: int | None, num_tokens: int, attention: str = "auto"
) -> PagedModel:
    """The model with its store.

    ``num_blocks`` None: what memory allows, on a CPU at most what ``num_tokens`` tokens need. ``SetupError`` when the
    model cannot be served over the store or memory does not suffice.
    """
    model: Any = loaded.model
    # Nothing of the model's own defaults (temperature, penalties, lists of bad words) may act beside our sampling.
    model.generation_config = GenerationConfig()
    try:
        chosen, backend = choose_backend(attention, loaded.device)
    except ValueError as error:
        raise SetupError(str(error)) from None
    specs = layer_specs(model)
    paged = attach(model, specs, backend, quantized=loaded.quantization != "none")
    bytes_per_block = block_size * sum(s.bytes_per_token for s in specs)
    blocks = num_blocks or default_num_blocks(bytes_per_block, loaded.device, -(-num_tokens // block_size))
    store = KVStore(specs, blocks, block_size)
    logger.info("K/V store: %d blocks of %d tokens, %d bytes a token", blocks, block_size, store.bytes_per_token)
    logger.info("attention: %s", f"paged, {chosen}" if paged else "the model's own, over a dense gather")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    # Never stored and never attended to, so any id will do.
    return PagedModel(model, store, backend, loaded.device, vocab_size, pad_token_id=0, dense=not paged)
