"""From logits to tokens for the rows of a batch, each with its own parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from microbatch.core.plan import Admitted, TokenLogprobs
from microbatch.core.ports import FormMatcher, Forms
from microbatch.core.request import SamplingParams
from microbatch.errors import ExecutionError
from microbatch.executor import vocabulary
from microbatch.executor.draws import Draws
from microbatch.executor.filters import Filters
from microbatch.executor.form_masks import FormMasks
from microbatch.executor.logprobs import RawLogprobs
from microbatch.executor.penalties import Adjustment, Adjustments


@dataclass(slots=True)
class SampledTokens:
    """What sampling made of the rows: a token by seq_id, log-probabilities where asked for, errors in a token's
    place."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """What sampling needs of one sequence. ``position`` is that of the next token."""

    params: SamplingParams
    draws: Draws
    position: int
    adjustment: Adjustment | None
    matcher: FormMatcher | None = None

    def append(self, token_id: int) -> None:
        self.position += 1
        if self.matcher is not None:
            self.matcher.accept([token_id])
        if self.adjustment is not None:
            self.adjustment.append(token_id)


class _Rows:
    """The rows of a batch, and what is made of their parameters once for as long as they stay the same."""

    def __init__(self, states: Sequence[_State], device: torch.device, forms: Forms | None) -> None:
        self.states = states
        self.wanted = [(r, s.params.logprobs) for r, s in enumerate(states) if s.params.logprobs is not None]
        adjusted = [(r, s.adjustment) for r, s in enumerate(states) if s.adjustment is not None]
        self.adjustments = Adjustments(adjusted, device) if adjusted else None
        formed = [(r, s.matcher) for r, s in enumerate(states) if s.matcher is not None]
        self.masks = FormMasks(formed, forms, device) if formed and forms is not None else None
        random = [r for r, s in enumerate(states) if not s.params.greedy]
        self._random_states = [states[r] for r in random]
        self._random = torch.tensor(random, dtype=torch.int64, device=device)
        self._filters = Filters([s.params for s in self._random_states], device)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens ``[N]`` and the largest logits ``[N]``; changes ``logits``."""
        largest, tokens = vocabulary.best(logits)
        if not self._random_states:
            return tokens, largest
        uniforms = [s.draws.at(s.position) for s in self._random_states]
        if len(uniforms) == len(logits):
            return self._filters.draw(logits, largest, uniforms), largest
        tokens[self._random] = self._filters.draw(logits[self._random], largest[self._random], uniforms)
        return tokens, largest


class Sampler:
    """Keeps what sampling needs of each sequence in the batch: seed, position, token counts."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device,
        forms: Forms | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._device = device
        self._forms = forms
        self._states: dict[int, _State] = {}
        self._last: tuple[list[int], _Rows] | None = None

    def admit(self, admitted: Admitted, params: SamplingParams) -> None:
        """A sequence enters; its past output is counted, so that it goes on exactly where a preemption cut it."""
        adjustment = None
        if Adjustment.needed(params):
            adjustment = Adjustment(admitted, params, self._vocab_size, self._eos)
        position = len(admitted.prompt_token_ids) + len(admitted.output_token_ids)
        matcher = self._matcher(admitted, params) if params.structured_output is not None else None
        self._states[admitted.seq_id] = _State(params, Draws(admitted.seed), position, adjustment, matcher)
        self._last = None

    def _matcher(self, admitted: Admitted, params: SamplingParams) -> FormMatcher:
        if self._forms is None or params.structured_output is None:
            raise ValueError("this executor cannot hold answers to a form")
        matcher = self._forms.matcher(params.structured_output)
        matcher.accept(admitted.output_token_ids)
        return matcher

    def release(self, seq_ids: Collection[int]) -> None:
        """Sequences leave; unknown ids are ignored."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)
            self._last = None

    def sample(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> SampledTokens:
        """One token for each sequence; ``logits`` float32 ``[N, V]``, row i belongs to ``seq_ids[i]``.

        Changes ``logits``. A row that holds a NaN, or nothing finite, becomes an error and leaves the others alone.
        """
        rows = self._rows(seq_ids)
        raw = RawLogprobs(logits, rows.wanted) if rows.wanted else None
        if rows.adjustments is not None:
            rows.adjustments.apply(logits)
        if rows.masks is not None:
            rows.masks.apply(logits)
        tokens, largest = rows.choose(logits)
        logprobs = raw.of(tokens) if raw is not None else {}
        token_ids, finite = torch.stack((tokens, largest.isfinite())).tolist()
        sampled = SampledTokens()
        for row, (seq_id, token_id, state) in enumerate(zip(seq_ids, token_ids, rows.states)):
            if not finite[row]:
                sampled.errors[seq_id] = "the model gave logits that are not numbers for this request"
                continue
            try:
                state.append(token_id)
            except ExecutionError as error:  # the form of this answer; the others go on
                sampled.errors[seq_id] = error.message
                continue
            sampled.token_ids[seq_id] = token_id
            if row in logprobs:
                sampled.logprobs[seq_id] = logprobs[row]
        return sampled

    def _rows(self, seq_ids: Sequence[int]) -> _Rows:
        if self._last is None or self._last[0] != seq_ids:
            self._last = list(seq_ids), _Rows([self._states[s] for s in seq_ids], self._device, self._forms)
        return self._last[1]
