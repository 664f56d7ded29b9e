"""What a layer keeps of each token: the shapes of its keys and values, and whether it keeps anything else.

Two answers, because a model may put one thing in its cache and attend to another: with multi-head latent attention
(DeepSeek) the cache holds a small latent vector, the attention function gets the keys and values made of it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from microbatch.errors import SetupError
from microbatch.executor.quiet import first_line
from microbatch_kernels.store import LayerSpec

_RECORDER: Final = "microbatch_shapes"


def refuse_other_state(model: Any) -> None:
    """``SetupError`` if a layer of the model keeps more than keys and values (linear attention, convolutions, an
    index)."""
    for index, layer in enumerate(_new_cache(model).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _other_state(model, index, layer)


@torch.no_grad()
def cached_specs(model: Any) -> list[LayerSpec]:
    """The K/V of every layer as the model gives it to its cache, read off a forward of two tokens."""
    cache = _new_cache(model)
    try:
        model(input_ids=torch.tensor([[1, 2]], device=model.device), cache=cache, use_cache=True)
    except Exception as error:  # a foreign model may raise anything
        raise _no_cache(model, error) from error
    specs = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            raise _other_state(model, index, layer)
        specs.append(_spec(keys, values))
    if not specs:
        raise SetupError(f"{type(model).__name__} puts nothing in a K/V cache: microbatch cannot serve it")
    return specs


@torch.no_grad()
def attended_specs(model: Any) -> list[LayerSpec] | None:
    """The K/V of every layer as its attention function gets it. None for a model whose attention cannot be replaced, or
    not in all of its layers."""
    if not type(model)._can_set_attn_implementation():
        return None
    AttentionInterface.register(_RECORDER, _record)
    own = model.config._attn_implementation
    seen: dict[int, LayerSpec] = {}
    try:
        model.set_attn_implementation(_RECORDER)
        model(input_ids=torch.tensor([[1, 2]], device=model.device), use_cache=False, seen=seen)
    except Exception:  # whatever a foreign model raises, it means no
        return None
    finally:
        model.set_attn_implementation(own)
    layers = range(model.config.get_text_config().num_hidden_layers)
    return [seen[i] for i in layers] if seen.keys() == set(layers) else None


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    seen: dict[int, LayerSpec],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """In the place of an attention function: notes the shapes, attends to nothing."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    seen[layer] = _spec(key, value)
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[-1]), None


def _new_cache(model: Any) -> DynamicCache:
    try:
        return DynamicCache(config=model.config)
    except Exception as error:  # layers of a kind that transformers has no cache for
        raise _no_cache(model, error) from error


def _no_cache(model: Any, error: Exception) -> SetupError:
    return SetupError(
        f"{type(model).__name__} does not run with a K/V cache ({type(error).__name__}: {first_line(error)}):"
        " microbatch cannot serve it"
    )


def _spec(keys: torch.Tensor, values: torch.Tensor) -> LayerSpec:
    return LayerSpec(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)


def _other_state(model: Any, index: int, layer: object) -> SetupError:
    return SetupError(
        f"{type(model).__name__} keeps state other than keys and values in layer {index} ({type(layer).__name__}),"
        " which the paged store cannot hold: microbatch cannot serve it"
    )
