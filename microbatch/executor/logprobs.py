"""Log-probabilities from the raw logits of the model, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microbatch.core.plan import TokenLogprobs
from microbatch.executor import vocabulary


class RawLogprobs:
    """Kept from before sampling, when the logits are the model's own, until the tokens are chosen.

    ``wanted`` gives the row and the number of best alternatives of each row that asks.
    """

    def __init__(self, logits: torch.Tensor, wanted: Sequence[tuple[int, int]]) -> None:
        self._wanted = wanted
        self._rows = torch.tensor([row for row, _ in wanted], device=logits.device)
        self._logprobs = logits[self._rows].log_softmax(-1)

    def of(self, tokens: torch.Tensor) -> dict[int, TokenLogprobs]:
        """By row, for the chosen ``tokens`` (``[N]``, of all rows)."""
        chosen = self._logprobs.gather(1, tokens[self._rows][:, None])[:, 0].tolist()
        most = min(max(count for _, count in self._wanted), self._logprobs.shape[1])
        values, ids = (t.tolist() for t in vocabulary.top(self._logprobs, most))
        return {
            row: TokenLogprobs(chosen[i], tuple(zip(ids[i][:count], values[i][:count])))
            for i, (row, count) in enumerate(self._wanted)
        }
