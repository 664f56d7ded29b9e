"""Before a model serves: does it run over the paged store, and does it give the same logits there?

A model whose attention cannot be replaced only warns and would then answer wrongly in silence. So two rows of
different length go through the store, padded as a batch of ``generate`` is and packed as a step of the step loop is,
and are compared with the model's own dense forward of each row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from microbatch.core.plan import SequenceStep
from microbatch.core.request import SamplingParams
from microbatch.errors import SetupError
from microbatch.executor.attention import ATTENTION_NAME, PagedStep, register
from microbatch.executor.cache import DenseCache, PagedCache
from microbatch.executor.kv_shapes import attended_specs, cached_specs, refuse_other_state
from microbatch.executor.padding import PaddedBatch
from microbatch.executor.quiet import first_line
from microbatch.executor.windows import window_problem
from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.metadata import slot_mapping
from microbatch_kernels.store import KVStore, LayerSpec

logger = logging.getLogger(__name__)

_BLOCK_SIZE: Final = 4
_LENGTHS: Final = (3, 11)
#: The packed form feeds each row in two steps, this much of it in the first.
_FIRST_CHUNKS: Final = (1, 6)
#: Root mean square of the difference over that of the dense logits.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
#: INT8 layers of bitsandbytes choose their outlier columns by the whole batch, so company changes the logits a little.
_QUANTIZED_TOLERANCE = 0.15
#: K/V in 8 bits against the same K/V unrounded: no measure of accuracy, only of sense.
_STORAGE_TOLERANCE = 0.3

#: Last logits of each row over a store, and the step that the forward went through.
_Outcome = tuple[torch.Tensor, PagedStep]


def layer_specs(model: Any) -> list[LayerSpec]:
    """Shape and place of every layer's K/V over the store. ``SetupError`` if the model keeps other state."""
    refuse_other_state(model)
    return attended_specs(model) or cached_specs(model)


def probe_logits(model: Any) -> torch.Tensor:
    """The model's own logits for the rows that ``attach`` tries: taken before anything of the model is replaced."""
    return _dense_logits(model, _rows(model))


def attach(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    *,
    quantized: bool = False,
    packed: bool = False,
    expected: torch.Tensor | None = None,
) -> bool:
    """Make ``model`` attend over a store of ``specs``; with ``packed`` it must do so in the step loop too.

    Returns False when it must keep its own attention over a dense gather, whose store is one of ``cached_specs``.
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
        problem = _paged_problem(model, specs, backend, rows, (expected, tolerance), packed)
        if problem is None:
            return True
        model.set_attn_implementation(own)
        logger.warning("%s: paged attention does not fit (%s); using a dense gather", type(model).__name__, problem)
    problem = _problem(model, cached_specs(model), backend, rows, (expected, tolerance), DenseCache)
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
    try:
        logits = [model(input_ids=torch.tensor([r], device=model.device), use_cache=False).logits[0, -1] for r in rows]
    except Exception as error:
        raise SetupError(
            f"{type(model).__name__} does not run ({type(error).__name__}: {first_line(error)}): microbatch cannot"
            " serve it"
        ) from error
    return torch.stack(logits).float()


def _paged_problem(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    rows: Sequence[Sequence[int]],
    wanted: tuple[torch.Tensor, float],
    packed: bool,
) -> str | None:
    """What is wrong with our attention in this model, or None. ``wanted``: the right logits, how far off is right."""
    layers = len(specs)
    padded = partial(_paged_logits, model, specs, backend, rows, PagedCache)
    problem = _judge(padded, layers, wanted, lambda step: window_problem(model, step.windows))
    if problem is None and packed:
        problem = _judge(lambda: _packed_logits(model, specs, backend, rows), layers, wanted)
        problem = problem and f"in the step loop: {problem}"
    return problem


def _problem(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    rows: Sequence[Sequence[int]],
    wanted: tuple[torch.Tensor, float],
    cache_class: type[PagedCache],
) -> str | None:
    """What is wrong with the logits over the store, or None. ``wanted``: the right ones, and how far off is right."""
    return _judge(lambda: _paged_logits(model, specs, backend, rows, cache_class), len(specs), wanted)


def _judge(
    run: Callable[[], _Outcome],
    num_layers: int,
    wanted: tuple[torch.Tensor, float],
    more: Callable[[PagedStep], str | None] = lambda step: None,
) -> str | None:
    """What is wrong with the logits that ``run`` gives, or with its step by ``more``; or None."""
    expected, tolerance = wanted
    try:
        logits, step = run()
    except Exception as error:  # whatever a foreign model raises, it means no
        return f"{type(error).__name__}: {first_line(error)}"
    if step.num_calls != num_layers:
        return f"{step.num_calls} of {num_layers} attention layers went through the store"
    ratio = ((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    if not ratio <= tolerance:
        return f"its logits differ from the right ones by {ratio:.1e}"
    return more(step)


@torch.no_grad()
def _paged_logits(
    model: Any,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    rows: Sequence[Sequence[int]],
    cache_class: type[PagedCache],
) -> _Outcome:
    """Two forwards with a cache, as ``generate`` makes them: the rows padded, then their last token each."""
    store = _store(specs, rows)
    steps = [_step(index, row[:-1], 0) for index, row in enumerate(rows)]
    batch = PaddedBatch.build(steps, pad_token_id=0)
    cache = cache_class(len(specs), 0)
    mask, slots = torch.tensor(batch.attention_mask), torch.tensor(batch.slots(steps, _BLOCK_SIZE))
    _padded_step(model, store, backend, steps, cache, (batch.input_ids, mask, slots), batch.packed)
    lasts = [_step(index, row[-1:], len(row) - 1) for index, row in enumerate(rows)]
    places = [slot_mapping(s.block_ids, s.start, 1, _BLOCK_SIZE) for s in lasts]
    mask, slots = torch.cat([mask, mask.new_ones(len(rows), 1)], 1), torch.cat([slots, torch.tensor(places)], 1)
    return _padded_step(model, store, backend, lasts, cache, ([[row[-1]] for row in rows], mask, slots), None)


def _padded_step(
    model: Any,
    store: KVStore,
    backend: AttentionBackend,
    steps: Sequence[SequenceStep],
    cache: PagedCache,
    layout: tuple[list[list[int]], torch.Tensor, torch.Tensor],
    packed: list[int] | None,
) -> _Outcome:
    """``layout``: tokens of this forward; mask and slots of all columns so far."""
    ids, mask, slots = layout
    device = model.device
    valid = None if packed is None else torch.tensor(packed, device=device)
    cache.step = PagedStep(store, backend, _inputs(model, steps), valid)
    if isinstance(cache, DenseCache):
        cache.slots = slots.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -len(ids[0]) :]
    logits = model(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        cache=cache,
        use_cache=True,
    ).logits[:, -1]
    return logits.float(), cache.step


@torch.no_grad()
def _packed_logits(
    model: Any, specs: Sequence[LayerSpec], backend: AttentionBackend, rows: Sequence[Sequence[int]]
) -> _Outcome:
    """Two packed forwards without a cache, as the step loop makes them: a chunk of each row, then the rest."""
    store = _store(specs, rows)
    chunks = list(zip(rows, _FIRST_CHUNKS, strict=True))
    _packed_step(model, store, backend, [_step(index, row[:first], 0) for index, (row, first) in enumerate(chunks)])
    rest = [_step(index, row[first:], first) for index, (row, first) in enumerate(chunks)]
    return _packed_step(model, store, backend, rest)


def _packed_step(model: Any, store: KVStore, backend: AttentionBackend, steps: Sequence[SequenceStep]) -> _Outcome:
    lasts = torch.tensor([len(s.token_ids) for s in steps], device=model.device).cumsum(0) - 1
    step = PagedStep(store, backend, _inputs(model, steps), packed=None)
    logits = model(
        input_ids=torch.tensor([[t for s in steps for t in s.token_ids]], device=model.device),
        position_ids=torch.tensor(
            [[p for s in steps for p in range(s.start, s.start + len(s.token_ids))]], device=model.device
        ),
        use_cache=False,
        logits_to_keep=lasts,
        paged=step,
    ).logits[0]
    return logits.float(), step


def _store(specs: Sequence[LayerSpec], rows: Sequence[Sequence[int]]) -> KVStore:
    return KVStore(specs, num_blocks=2 * len(rows) * max(_LENGTHS) // _BLOCK_SIZE, block_size=_BLOCK_SIZE)


def _inputs(model: Any, steps: Sequence[SequenceStep]) -> AttentionInputs:
    return AttentionInputs.build([(s.block_ids, s.start, len(s.token_ids)) for s in steps], _BLOCK_SIZE, model.device)


def _step(index: int, tokens: Sequence[int], start: int) -> SequenceStep:
    """Tokens of row ``index`` at positions from ``start``, in blocks of that row's own."""
    blocks = -(-(start + len(tokens)) // _BLOCK_SIZE)
    first = 1 + index * (max(_LENGTHS) // _BLOCK_SIZE + 1)
    return SequenceStep(index, tuple(tokens), start, tuple(range(first, first + blocks)), True, SamplingParams())
