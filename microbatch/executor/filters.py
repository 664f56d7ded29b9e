"""Temperature, top-k, top-p and min-p over the rows of a batch, and the draw from what is left.

Every row is computed from its own logits alone, so the token does not depend on the other rows. The draw is the
inverse of the cumulative distribution at a given uniform number. Rows without top-k and top-p need no sorting; the
others look at their best tokens first and, where these do not hold enough mass, at more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from microbatch.core.request import SamplingParams
from microbatch.executor import vocabulary

#: Candidates looked at, one number after the other, before all tokens are. Nearly every nucleus lies within the first.
_CANDIDATES: Final = (128, 1024)


class Filters:
    """The parameters of some rows as tensors: made once for as long as the rows stay the same."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._device = device
        self._temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device)
        plain = [r for r, p in enumerate(params) if p.top_k <= 0 and p.top_p >= 1]
        cut = [r for r, p in enumerate(params) if not (p.top_k <= 0 and p.top_p >= 1)]
        floors = [params[r].min_p for r in plain]
        self._floor = torch.tensor(floors, dtype=torch.float32, device=device)[:, None] if any(floors) else None
        self._cuts = _Cuts.of([params[r] for r in cut], device)
        self._plain = torch.tensor(plain, dtype=torch.int64, device=device)
        self._cut = torch.tensor(cut, dtype=torch.int64, device=device)

    def draw(self, logits: torch.Tensor, largest: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
        """Token ids int64 ``[R]`` from ``logits`` float32 ``[R, V]``, which are changed; ``largest`` ``[R]`` of each.

        Top-k comes first, top-p on what it leaves renormalised, min-p relative to the best token: the order of the
        field. A row that is not numbers gets any token.
        """
        # The largest weight is 1, so a token's weight is its share of the best one's.
        weights = logits.sub_(largest[:, None]).div_(self._temperature).exp_()
        uniform = torch.tensor(uniforms, dtype=torch.float64, device=self._device)
        if not len(self._cut):
            return self._draw_plain(weights, uniform)
        if not len(self._plain):
            return _draw_cut(weights, vocabulary.total(weights), self._cuts, uniform)
        tokens = torch.empty(len(weights), dtype=torch.int64, device=self._device)
        tokens[self._plain] = self._draw_plain(weights[self._plain], uniform[self._plain])
        cut = weights[self._cut]
        tokens[self._cut] = _draw_cut(cut, vocabulary.total(cut), self._cuts, uniform[self._cut])
        return tokens

    def _draw_plain(self, weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """In the order of token ids."""
        if self._floor is not None:
            weights.masked_fill_(weights < self._floor, 0.0)
        return vocabulary.invert(weights, uniform)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """top-k (0 for none), top-p and min-p of rows, ``[R, 1]`` each."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> _Cuts:
        top_k = torch.tensor([max(0, p.top_k) for p in params], dtype=torch.int64, device=device)
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
        return cls(top_k[:, None], top_p[:, None], min_p[:, None])

    def rows(self, rows: torch.Tensor) -> _Cuts:
        return _Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """``Filters.draw`` for rows that are seen once; changes nothing."""
    return Filters(params, logits.device).draw(logits.clone(), logits.amax(-1), uniforms)


def _draw_cut(
    weights: torch.Tensor, total: torch.Tensor, cuts: _Cuts, uniform: torch.Tensor, level: int = 0
) -> torch.Tensor:
    """From the best tokens of each row; rows that these cannot decide look at more. ``total`` ``[R]`` is the weight of
    the whole vocabulary."""
    width = weights.shape[1]
    size = min(width, _CANDIDATES[level]) if level < len(_CANDIDATES) else width
    values, ids = vocabulary.top(weights, size)
    candidates = values.double()
    tokens = ids.gather(1, _draw_candidates(candidates, total, cuts, uniform)[:, None])[:, 0]
    if size < width:
        missing = (cuts.top_k == 0) & (candidates.sum(-1, keepdim=True) < cuts.top_p * total[:, None])
        short = ((cuts.top_k > size) | missing).nonzero()[:, 0]
        if len(short):
            tokens[short] = _draw_cut(weights[short], total[short], cuts.rows(short), uniform[short], level + 1)
    return tokens


def _draw_candidates(weights: torch.Tensor, total: torch.Tensor, cuts: _Cuts, uniform: torch.Tensor) -> torch.Tensor:
    """Places in ``weights`` ``[R, C]``, which are in descending order; they are changed."""
    limited = cuts.top_k > 0
    weights.masked_fill_(limited & (torch.arange(weights.shape[1], device=weights.device) >= cuts.top_k), 0.0)
    cumulative = weights.cumsum(-1)
    mass = cumulative[:, -1:].where(limited, total[:, None])
    dropped = (cumulative - weights >= cuts.top_p * mass) | (weights < cuts.min_p)
    dropped[:, 0] = False
    return vocabulary.invert(weights.masked_fill_(dropped, 0.0), uniform)
