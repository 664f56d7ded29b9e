"""Temperature, top-k, top-p and min-p over the rows of a batch, and the draw from what is left.

Every row is computed from its own logits alone, so the token does not depend on the other rows. The draw is the
inverse of the cumulative distribution at a given uniform number. Rows without top-k and top-p need no sorting; the
others look at the 1,024 best tokens and, where these do not hold enough mass, at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microbatch.core.request import SamplingParams

#: Candidates looked at first; almost every top-p nucleus lies within.
_CANDIDATES = 1024


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Token ids int64 ``[R]`` from ``logits`` float32 ``[R, V]``; row r uses ``params[r]`` and ``uniforms[r]``.

    Top-k comes first, top-p on what it leaves renormalised, min-p relative to the best token: the order of the field.
    """
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    uniform = torch.tensor(list(uniforms), dtype=torch.float64, device=device)
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    plain = [r for r, p in enumerate(params) if p.top_k <= 0 and p.top_p >= 1]
    sorted_rows = [r for r, p in enumerate(params) if not (p.top_k <= 0 and p.top_p >= 1)]
    if plain:
        rows = torch.tensor(plain, device=device)
        tokens[rows] = _draw_plain(scaled[rows], [params[r].min_p for r in plain], uniform[rows])
    if sorted_rows:
        rows = torch.tensor(sorted_rows, device=device)
        tokens[rows] = _draw_sorted(scaled[rows], [params[r] for r in sorted_rows], uniform[rows])
    return tokens


def _draw_plain(scaled: torch.Tensor, min_p: Sequence[float], uniform: torch.Tensor) -> torch.Tensor:
    """In the order of token ids; ``scaled`` has maximum 0, so a token's share of the best one is its exponential."""
    weights = scaled.exp()
    floor = torch.tensor(list(min_p), dtype=torch.float32, device=scaled.device)
    return _invert(weights.where(weights >= floor[:, None], 0.0), uniform)


def _draw_sorted(scaled: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    vocabulary = scaled.shape[1]
    size = min(vocabulary, _CANDIDATES)
    values, ids = scaled.topk(size, dim=-1)
    total = scaled.exp().sum(-1, dtype=torch.float64)
    covered = values.exp().sum(-1, dtype=torch.float64) / total
    tokens = _draw_candidates(values, ids, total, params, uniform)
    short = [r for r, p in enumerate(params) if size < vocabulary and _needs_all(p, size, float(covered[r]))]
    if short:
        rows = torch.tensor(short, device=scaled.device)
        values, ids = scaled[rows].sort(dim=-1, descending=True)
        tokens[rows] = _draw_candidates(values, ids, total[rows], [params[r] for r in short], uniform[rows])
    return tokens


def _needs_all(params: SamplingParams, size: int, covered: float) -> bool:
    """Whether the first ``size`` candidates cannot decide the row."""
    if 0 < params.top_k <= size:
        return False
    return params.top_k > size or covered < params.top_p


def _draw_candidates(
    values: torch.Tensor,
    ids: torch.Tensor,
    total: torch.Tensor,
    params: Sequence[SamplingParams],
    uniform: torch.Tensor,
) -> torch.Tensor:
    """``values`` (descending) and ``ids`` ``[R, C]``; ``total`` ``[R]`` is the weight of the whole vocabulary."""
    device, width = values.device, values.shape[1]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else width for p in params], device=device)
    limited = torch.tensor([p.top_k > 0 for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    floor = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    weights = values.exp().double()
    weights = weights.where(torch.arange(width, device=device)[None, :] < top_k[:, None], 0.0)
    total = torch.where(limited, weights.sum(-1), total)
    before = weights.cumsum(-1) - weights
    keep = before < (top_p * total)[:, None]
    keep[:, 0] = True
    keep &= weights >= floor[:, None]
    picked = _invert(weights.where(keep, 0.0), uniform)
    return ids.gather(1, picked[:, None])[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index ``[R]`` at which the cumulative weight passes ``uniform`` times its total. Zero weights are never
    picked."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
