"""From logits to tokens for the rows of a batch, each with its own parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from microbatch.core.plan import Admitted, TokenLogprobs
from microbatch.core.request import SamplingParams
from microbatch.executor.draws import uniform
from microbatch.executor.filters import draw
from microbatch.executor.penalties import LogitAdjustment


@dataclass(slots=True)
class SampledTokens:
    """What sampling made of the rows: a token by seq_id, log-probabilities where asked for, errors in a token's
    place."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    params: SamplingParams
    seed: int
    position: int
    adjustment: LogitAdjustment | None

    def append(self, token_id: int) -> None:
        self.position += 1
        if self.adjustment is not None:
            self.adjustment.append(token_id)


class Sampler:
    """Keeps what sampling needs of each sequence in the batch: seed, position, token counts."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._device = device
        self._states: dict[int, _State] = {}

    def admit(self, admitted: Admitted, params: SamplingParams) -> None:
        """A sequence enters; its past output is counted, so that it goes on exactly where a preemption cut it."""
        adjustment = None
        if LogitAdjustment.needed(params):
            adjustment = LogitAdjustment(admitted, params, self._vocab_size, self._eos, self._device)
        position = len(admitted.prompt_token_ids) + len(admitted.output_token_ids)
        self._states[admitted.seq_id] = _State(params, admitted.seed, position, adjustment)

    def release(self, seq_ids: Collection[int]) -> None:
        """Sequences leave; unknown ids are ignored."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def sample(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> SampledTokens:
        """One token for each sequence; ``logits`` float32 ``[N, V]``, row i belongs to ``seq_ids[i]``.

        Changes ``logits``. A row that holds a NaN, or nothing finite, becomes an error and leaves the others alone.
        """
        sampled = SampledTokens()
        states = [self._states[s] for s in seq_ids]
        raw = _raw_logprobs(logits, seq_ids, states)
        for row, state in enumerate(states):
            if state.adjustment is not None:
                state.adjustment.apply(logits[row])
        best, tokens = logits.max(dim=-1)
        finite = torch.isfinite(best).tolist()
        random_rows = [r for r, s in enumerate(states) if finite[r] and not s.params.greedy]
        if random_rows:
            rows = torch.tensor(random_rows, device=logits.device)
            chosen = [states[r] for r in random_rows]
            draws = [uniform(s.seed, s.position) for s in chosen]
            tokens[rows] = draw(logits[rows], [s.params for s in chosen], draws)
        for seq_id, token_id, ok, state in zip(seq_ids, tokens.tolist(), finite, states, strict=True):
            if not ok:
                sampled.errors[seq_id] = "the model gave logits that are not numbers for this request"
                continue
            sampled.token_ids[seq_id] = token_id
            state.append(token_id)
            if seq_id in raw:
                row_logprobs, top = raw[seq_id]
                sampled.logprobs[seq_id] = TokenLogprobs(float(row_logprobs[token_id]), top)
        return sampled


def _raw_logprobs(
    logits: torch.Tensor, seq_ids: Sequence[int], states: Sequence[_State]
) -> dict[int, tuple[torch.Tensor, tuple[tuple[int, float], ...]]]:
    """Log-softmax of the raw logits and its best entries, for the rows that ask for them."""
    raw = {}
    for row, (seq_id, state) in enumerate(zip(seq_ids, states, strict=True)):
        wanted = state.params.logprobs
        if wanted is None:
            continue
        row_logprobs = logits[row].log_softmax(-1)
        values, ids = row_logprobs.topk(min(wanted, row_logprobs.shape[-1]))
        raw[seq_id] = (row_logprobs, tuple(zip(ids.tolist(), values.tolist(), strict=True)))
    return raw
