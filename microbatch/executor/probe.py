"""Before a model serves: does it run over the paged store, and does it give the same logits there?

A model whose attention cannot be replaced only warns and would then answer wrongly in silence. So two rows of
different length, padded as a batch is, go through the store and are compared with the model's own dense forward of
each row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from microbatch.core.plan import SequenceStep
from microbatch.core.request import SamplingParams
from microbatch.errors import SetupError
from microbatch.executor.attention import ATTENTION_NAME, PagedStep, register
from microbatch.executor.cache import DenseCache, PagedCache
from microbatch.executor.padding import PaddedBatch
from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.store import KVStore, LayerSpec

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 4
_LENGTHS = (3, 11)
#: Root mean square of the difference over that of the dense logits.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
#: INT8 layers of bitsandbytes choose their outlier columns by the whole batch, so company changes the logits a little.
_QUANTIZED_TOLERANCE = 0.15
#: K/V in 8 bits against the same K/V unrounded: no measure of accuracy, only of sense.
_STORAGE_TOLERANCE = 0.3


@torch.no_grad()
def layer_specs(model: Any) -> list[LayerSpec]:
    """Shape and place of every layer's K/V, read off a forward of two tokens. ``SetupError`` if it keeps other
    state."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[1, 2]], device=model.device), cache=cache, use_cache=True)
    specs = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            raise SetupError(
                f"{type(model).__name__} keeps state other than keys and values in layer {index}"
                f" ({type(layer).__name__}); the paged store cannot hold it"
            )
        specs.append(LayerSpec(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, keys.device))
    return specs


def probe_logits(model: Any) -> torch.Tensor:
    """The model's own logits for the rows that ``attach`` tries: taken before anything of the model is replaced."""
    return _dense_logits(model, _rows(model))


def attach(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    *,
    quantized: bool = False,
    expected: torch.Tensor | None = None,
) -> bool:
    """Make ``model`` attend over the paged store. Returns False when it must keep its own attention over a dense
    gather.

    ``expected``: its own ``probe_logits``, where parts of it have been replaced since. Raises ``SetupError`` when
    neither way gives the right logits.
    """
    register()
    rows = _rows(model)
    if expected is None:
        expected = probe_logits(model)
    tolerance = _QUANTIZED_TOLERANCE if quantized else _TOLERANCE.get(specs[0].dtype, _HALF_TOLERANCE)
    own = model.config._attn_implementation
    if type(model)._can_set_attn_implementation():
        model.set_attn_implementation(ATTENTION_NAME)
        problem = _problem(model, specs, backend, rows, (expected, tolerance), PagedCache)
        if problem is None:
            return True
        model.set_attn_implementation(own)
        logger.warning("%s: paged attention does not fit (%s); using a dense gather", type(model).__name__, problem)
    problem = _problem(model, specs, backend, rows, (expected, tolerance), DenseCache)
    if problem is not None:
        raise SetupError(f"{type(model).__name__} cannot be served over the paged store: {problem}")
    return False


def store_as(
    model: Any, specs: Sequence[LayerSpec], backend: AttentionBackend, kv_dtype: str, *, paged: bool
) -> list[LayerSpec]:
    """The layers with their K/V kept as ``kv_dtype``, for a model that ``attach`` has put over the store.

    Raises ``SetupError`` when the model's logits then make no sense, or the backend cannot read that format.
    """
    stored = [spec.stored_as(kv_dtype) for spec in specs]
    if stored == list(specs):
        return stored
    rows, cache_class = _rows(model), PagedCache if paged else DenseCache
    expected, _ = _paged_logits(model, specs, backend, rows, cache_class)
    problem = _problem(model, stored, backend, rows, (expected, _STORAGE_TOLERANCE), cache_class)
    if problem is not None:
        raise SetupError(f"--kv-dtype {kv_dtype} does not suit {type(model).__name__}: {problem}; use --kv-dtype auto")
    return stored


def _rows(model: Any) -> list[list[int]]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [[(7 + 13 * i) % vocabulary for i in range(length)] for length in _LENGTHS]


@torch.no_grad()
def _dense_logits(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    logits = [model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0, -1] for row in rows]
    return torch.stack(logits).float()


def _problem(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    rows: Sequence[Sequence[int]],
    wanted: tuple[torch.Tensor, float],
    cache_class: type[PagedCache],
) -> str | None:
    """What is wrong with the logits over the store, or None. ``wanted``: the right ones, and how far off is right."""
    expected, tolerance = wanted
    try:
        logits, calls = _paged_logits(model, specs, backend, rows, cache_class)
    except Exception as error:  # whatever a foreign model raises, it means no
        return f"{type(error).__name__}: {error}"
    if calls != len(specs):
        return f"{calls} of {len(specs)} attention layers went through the store"
    ratio = ((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    if not ratio <= tolerance:
        return f"its logits differ from the right ones by {ratio:.1e}"
    return None


@torch.no_grad()
def _paged_logits(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    rows: Sequence[Sequence[int]],
    cache_class: type[PagedCache],
) -> tuple[torch.Tensor, int]:
    """Last logits of each row of one padded forward, and the number of attention calls that used the store."""
    store = KVStore(specs, num_blocks=2 * len(rows) * max(_LENGTHS) // _BLOCK_SIZE, block_size=_BLOCK_SIZE)
    steps = [_step(index, row) for index, row in enumerate(rows)]
    batch = PaddedBatch.build(steps, pad_token_id=0)
    cache = cache_class(len(specs), 0)
    inputs = AttentionInputs.build([(s.block_ids, 0, len(s.token_ids)) for s in steps], _BLOCK_SIZE, model.device)
    packed = None if batch.packed is None else torch.tensor(batch.packed, device=model.device)
    cache.step = PagedStep(store, backend, inputs, packed)
    if isinstance(cache, DenseCache):
        cache.slots = torch.tensor(batch.slots(steps, _BLOCK_SIZE), device=model.device)
    mask = torch.tensor(batch.attention_mask, device=model.device)
    logits = model(
        input_ids=torch.tensor(batch.input_ids, device=model.device),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        cache=cache,
        use_cache=True,
    ).logits[:, -1]
    return logits.float(), cache.step.num_calls


def _step(index: int, row: Sequence[int]) -> SequenceStep:
    blocks = -(-len(row) // _BLOCK_SIZE)
    first = 1 + index * (max(_LENGTHS) // _BLOCK_SIZE + 1)
    return SequenceStep(index, tuple(row), 0, tuple(range(first, first + blocks)), True, SamplingParams())
