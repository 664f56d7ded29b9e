"""What changes a sequence's logits before sampling: bias, penalties, end tokens held back."""

from __future__ import annotations

from collections.abc import Collection

import torch

from microbatch.core.plan import Admitted
from microbatch.core.request import SamplingParams


class LogitAdjustment:
    """The adjustments of one sequence, with the token counts that they need. Row by row, so neighbours never mix.

    ``repetition_penalty`` counts prompt and output (as transformers does: a positive logit is divided, a negative one
    multiplied); ``presence_penalty`` and ``frequency_penalty`` count the output alone (as OpenAI defines them).
    """

    def __init__(
        self,
        admitted: Admitted,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device,
    ) -> None:
        self._params = params
        self._num_output = len(admitted.output_token_ids)
        self._seen = self._counts = self._held_back = None
        if params.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            known = [*admitted.prompt_token_ids, *admitted.output_token_ids]
            self._seen[torch.tensor(known, device=device)] = True
        if params.presence_penalty or params.frequency_penalty:
            output = torch.tensor(admitted.output_token_ids, dtype=torch.int64, device=device)
            self._counts = torch.bincount(output, minlength=vocab_size).float()
        if params.min_tokens:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
            self._held_back = torch.tensor(sorted(i for i in ends if i < vocab_size), dtype=torch.int64, device=device)
        if params.logit_bias:
            self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters change logits at all."""
        return bool(
            params.logit_bias
            or params.min_tokens
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Change one row ``[V]`` (float32) in place."""
        params = self._params
        if self._seen is not None:
            penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(self._seen, penalised, logits))
        if self._counts is not None:
            logits -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        if params.logit_bias:
            logits.index_add_(0, self._bias_ids, self._bias)
        if self._held_back is not None and self._num_output < params.min_tokens:
            logits[self._held_back] = float("-inf")

    def append(self, token_id: int) -> None:
        """A token was sampled."""
        self._num_output += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1
