"""What one engine step does and what came of it: values of ids and ints, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from microbatch.core.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that enters the executor with this plan: what sampling must know of its past.

    ``output_token_ids`` is not empty when the sequence resumes after a preemption. ``seed`` is the sequence's own seed
    (drawn for it when the request has none); the draw of a token depends on it and on the token's position alone.
    """

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    seed: int
    #: Log-probabilities are wanted of the prompt tokens, from what is fed with this plan on.
    scores_prompt: bool = False


class SequenceStep(NamedTuple):
    """Feed ``token_ids`` at positions [start, start + len(token_ids)) of one sequence.

    ``block_ids`` is its whole block table, long enough for all positions fed so far. ``samples`` asks for one new token
    from the logits of the last position.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    samples: bool
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over a batch. ``released`` names sequences that left the batch since the last plan.

    With ``run_to_completion`` the batch is one ``model.generate`` that advances by one token a plan: only a plan whose
    ``admitted`` is not empty begins a batch, and it then admits every sequence in it. A plan without sequences closes a
    batch whose sequences have all left. ``num_rows`` counts the rows of the forward, those that have ended included;
    ``reason`` says why the batch closed: size, window, idle, drain or memory.

    ``swap_out`` (device block, host block), ``swap_in`` (host block, device block) and ``copies`` (source block, target
    block) are whole blocks to be copied before anything is fed, in this order.
    """

    step_id: int
    sequences: tuple[SequenceStep, ...]
    admitted: tuple[Admitted, ...] = ()
    released: tuple[int, ...] = ()
    run_to_completion: bool = True
    num_rows: int = 0
    reason: str = ""
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens fed in this step."""
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def useful_token_ratio(self) -> float:
        """Tokens fed over token positions computed: below 1 by the padding of a padded batch and by its ended rows."""
        if not self.run_to_completion or not self.sequences:
            return 1.0
        return self.num_tokens / (self.num_rows * max(len(s.token_ids) for s in self.sequences))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the best alternatives, from the raw logits of the model. ``rank`` of
    the token among all, from 1; 0 where it was not looked for."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor made of a plan: one token for each sequence that samples, or an error in its place.

    ``prompt_logprobs``: of a sequence that scores its prompt, for the prompt tokens behind each position that was fed.
    """

    step_id: int
    token_ids: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    def problem(self, seq_id: int, samples: bool) -> str | None:
        """What went wrong with one sequence of the plan, or None; ``samples``: it should have been given a token."""
        if samples and seq_id not in self.token_ids:
            return self.errors.get(seq_id, f"the executor gave no token for sequence {seq_id}")
        return self.errors.get(seq_id)


class Delta(NamedTuple):
    """News of one sequence: a new token, its end, or both.

    ``token_id`` is None when nothing new is to be shown (an end token, an abort, an error).
    """

    seq_id: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
