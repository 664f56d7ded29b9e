"""What changes logits before sampling: bias, penalties, end tokens held back. Only the tokens concerned are touched.

``repetition_penalty`` counts prompt and output (as transformers does: a positive logit is divided, a negative one
multiplied); ``presence_penalty`` and ``frequency_penalty`` count the output alone (as OpenAI defines them).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import torch

from microbatch.core.plan import Admitted
from microbatch.core.request import SamplingParams


class Adjustment:
    """What one sequence wants changed, with the token counts that this needs.

    ``token_ids`` are those that penalties concern, each once, and ``counts`` how often the output has them.
    """

    def __init__(
        self, admitted: Admitted, params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self.params = params
        self.token_ids = array("q")
        self.counts = array("f")
        self._places: dict[int, int] = {}
        self._num_output = 0
        self._penalises = _penalises(params)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._ends = sorted(i for i in ends if i < vocab_size) if params.min_tokens else []
        if params.repetition_penalty != 1:
            for token_id in dict.fromkeys(admitted.prompt_token_ids):
                self._count(token_id, 0)
        for token_id in admitted.output_token_ids:
            self.append(token_id)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters change logits at all."""
        return bool(params.logit_bias or params.min_tokens or _penalises(params))

    @property
    def held_back(self) -> Sequence[int]:
        """The end tokens that must not be chosen now."""
        return self._ends if self._num_output < self.params.min_tokens else ()

    def append(self, token_id: int) -> None:
        """A token was sampled."""
        self._num_output += 1
        if self._penalises:
            self._count(token_id, 1)

    def _count(self, token_id: int, count: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(count)
        else:
            self.counts[place] += count


class Adjustments:
    """Those of the rows of a batch, applied together: made once for as long as the rows stay the same."""

    def __init__(self, rows: Sequence[tuple[int, Adjustment]], device: torch.device) -> None:
        self._device = device
        self._penalised = [(row, a) for row, a in rows if _penalises(a.params)]
        self._holding = [(row, a) for row, a in rows if a.params.min_tokens]
        params = [a.params for _, a in self._penalised]
        self._rows = torch.tensor([row for row, _ in self._penalised], dtype=torch.int64, device=device)
        self._repetition = self._floats([p.repetition_penalty for p in params])
        self._frequency = self._floats([p.frequency_penalty for p in params])
        self._presence = self._floats([p.presence_penalty for p in params])
        biases = [(row, i, bias) for row, a in rows for i, bias in a.params.logit_bias.items()]
        self._biased = self._places([(row, i) for row, i, _ in biases])
        self._bias = self._floats([bias for _, _, bias in biases])

    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits`` ``[N, V]`` (float32) in place."""
        if self._penalised:
            self._penalise(logits)
        if len(self._bias):
            logits.index_put_(self._biased, self._bias, accumulate=True)
        held_back = [(row, i) for row, a in self._holding for i in a.held_back]
        if held_back:
            logits[self._places(held_back)] = float("-inf")

    def _penalise(self, logits: torch.Tensor) -> None:
        token_ids, counts = array("q"), array("f")
        for _, adjustment in self._penalised:
            token_ids.extend(adjustment.token_ids)
            counts.extend(adjustment.counts)
        if not token_ids:
            return
        lengths = torch.tensor([len(a.token_ids) for _, a in self._penalised], device=self._device)
        of = torch.repeat_interleave(lengths, output_size=len(token_ids))
        places = self._rows[of], torch.frombuffer(token_ids, dtype=torch.int64).to(self._device)
        count = torch.frombuffer(counts, dtype=torch.float32).to(self._device)
        values, repetition = logits[places], self._repetition[of]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[places] = values - (self._frequency[of] * count + self._presence[of] * (count > 0))

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _places(self, places: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, token id) pairs as an index."""
        rows, token_ids = torch.tensor(places, dtype=torch.int64, device=self._device).reshape(-1, 2).unbind(1)
        return rows, token_ids


def _penalises(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
