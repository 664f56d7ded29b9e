"""Searches along the vocabulary in two levels: over blocks of tokens, then within the blocks that matter.

The same answers as the plain searches of torch, with one quick pass over all logits where those take several slow ones.
Every row is computed from its own numbers alone.
"""

from __future__ import annotations

from typing import Final

import torch

_BLOCK: Final = 64
#: Of the search for many values, which looks at as many blocks.
_TOP_BLOCK: Final = 32
#: Rows that are no wider than this are searched in one go.
_NARROW: Final = 1024


def best(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value and the first place it stands at, ``[R]`` each, of ``values`` ``[R, V]``; NaN is the
    largest."""
    if values.shape[1] <= _NARROW:
        largest, place = values.max(dim=-1)
        return largest, place
    largest, block = _by_block(values, "amax", _BLOCK).max(dim=-1)
    inside, ids = _inside(values, block[:, None], _BLOCK)
    return largest, ids.gather(1, inside.argmax(-1, keepdim=True))[:, 0]


def top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest values of each row, in descending order, and their places, ``[R, count]`` each."""
    if count * _TOP_BLOCK * 2 > values.shape[1]:
        return values.topk(count, dim=-1)
    # Each of the largest values lies in one of the blocks with the largest maxima.
    blocks = _by_block(values, "amax", _TOP_BLOCK).topk(count, dim=-1, sorted=False).indices
    inside, ids = _inside(values, blocks, _TOP_BLOCK)
    largest, places = inside.topk(count, dim=-1)
    return largest, ids.gather(1, places)


def total(weights: torch.Tensor) -> torch.Tensor:
    """The sum of each row, float64 ``[R]``."""
    return _by_block(weights, "sum", _BLOCK).sum(-1, dtype=torch.float64)


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The place ``[R]`` at which the cumulative weight passes ``uniform`` (float64 ``[R]``) times its total. Zero
    weights are never picked."""
    narrow = weights.shape[1] <= _NARROW
    sums = weights if narrow else _by_block(weights, "sum", _BLOCK)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    target = _below(uniform * cumulative[:, -1], cumulative[:, -1])
    place = _passes(cumulative, target)
    if narrow:
        return place[:, 0]
    before = cumulative.gather(1, place) - sums.gather(1, place)
    inside, ids = _inside(weights, place, _BLOCK, outside=0.0)
    cumulative = inside.cumsum(-1, dtype=torch.float64)
    target = _below((target - before[:, 0]).clamp_(min=0), cumulative[:, -1])
    return ids.gather(1, _passes(cumulative, target))[:, 0]


def _by_block(values: torch.Tensor, reduction: str, size: int) -> torch.Tensor:
    """Maximum or sum of each block, ``[R, blocks]``; the last block may be shorter."""
    whole = values.shape[1] // size * size
    reduce = torch.amax if reduction == "amax" else torch.sum
    parts = [reduce(values[:, :whole].view(len(values), -1, size), -1)] if whole else []
    if whole < values.shape[1]:
        parts.append(reduce(values[:, whole:], -1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _inside(
    values: torch.Tensor, blocks: torch.Tensor, size: int, outside: float = float("-inf")
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in ``blocks`` ``[R, B]`` and their places, ``[R, B * size]``. Behind the end of a row the value is
    ``outside`` and the place the last one."""
    ids = (blocks[:, :, None] * size + torch.arange(size, device=values.device)).flatten(1)
    if values.shape[1] % size == 0:
        return values.gather(1, ids), ids
    beyond = ids >= values.shape[1]
    ids.clamp_(max=values.shape[1] - 1)
    return values.gather(1, ids).masked_fill_(beyond, outside), ids


def _passes(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``[R, 1]``: the first place at which ``cumulative`` is above ``target``. Of a row of NaN, any place."""
    return torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=cumulative.shape[1] - 1)


def _below(value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))
