"""The iteration-level executor: one packed forward a step, prefill chunks and decodes mixed, no padding.

``model(input_ids=[1, T], position_ids=[1, T])`` without a cache: the step's ``PagedStep`` travels in the keywords down
to our attention function, and ``logits_to_keep`` is an index, so the head runs only where a token is sampled.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from itertools import accumulate

import torch

from microbatch.core.plan import StepPlan, StepResult
from microbatch.core.ports import Forms
from microbatch.executor.attention import PagedStep
from microbatch.executor.faults import memory_faults
from microbatch.executor.graphs import DecodeGraphs
from microbatch.executor.inputs import InputsBuilder, PackedInputs
from microbatch.executor.prompt_scores import PromptScores
from microbatch.executor.run import PagedModel
from microbatch.executor.sampling import SampledTokens, Sampler


class PagedExecutor:
    """Implements ``core.ports.Executor`` for policies that decide before every step. Steps that fit ``graphs`` run
    through them."""

    def __init__(
        self,
        model: PagedModel,
        eos_token_ids: Collection[int] = (),
        graphs: DecodeGraphs | None = None,
        forms: Forms | None = None,
    ) -> None:
        if model.dense:
            raise ValueError("the packed forward needs a model whose attention runs over the store")
        self._model = model
        self._graphs = graphs
        self._sampler = Sampler(model.vocab_size, eos_token_ids, model.device, forms)
        self._prompts = PromptScores(model.model, model.vocab_size)
        self._inputs = InputsBuilder(model.store.block_size, model.device)

    @property
    def model(self) -> PagedModel:
        """The model and its store."""
        return self._model

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward over everything that the plan feeds; a token for each sequence that samples."""
        self._sampler.release(plan.released)
        self._prompts.follow(plan)
        with memory_faults(f"a step of {plan.num_tokens} tokens", self._model.device):
            self._admit(plan)
            self._model.move_blocks(plan)
            return self._forward(plan) if plan.sequences else StepResult(plan.step_id, {})

    def _admit(self, plan: StepPlan) -> None:
        if plan.admitted:
            params = {s.seq_id: s.params for s in plan.sequences}
            for admitted in plan.admitted:
                self._sampler.admit(admitted, params[admitted.seq_id])

    def reset(self) -> None:
        """Nothing is kept between steps but the sampling state, which the next plan releases."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def _forward(self, plan: StepPlan) -> StepResult:
        if self._graphs is not None and self._graphs.fits(plan.sequences):
            return self._sample(plan, self._graphs.run(plan.sequences), [s.seq_id for s in plan.sequences])
        inputs = self._inputs.build(plan.sequences)
        scored = self._prompts.wanted(plan.sequences)
        with self._prompts.watch() if scored else nullcontext():
            logits = self._logits(inputs)
            if scored:
                self._score(plan, scored, inputs, logits)
        return self._sample(plan, logits, inputs.seq_ids)

    def _logits(self, inputs: PackedInputs) -> torch.Tensor:
        model = self._model
        output = model.model(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.kept,
            paged=PagedStep(model.store, model.backend, inputs.attention, packed=None),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _score(self, plan: StepPlan, places: list[int], inputs: PackedInputs, logits: torch.Tensor) -> None:
        """The prompts of the sequences at these places of the plan."""
        prompts, hidden = self._prompts, self._prompts.hidden
        supported = prompts.check(None if hidden is None else hidden[0, inputs.kept[0]], logits[0])
        ends = list(accumulate(len(s.token_ids) for s in plan.sequences))
        for place in places:
            step = plan.sequences[place]
            if hidden is None or not supported:
                prompts.refuse(step)
            else:
                prompts.score(step, hidden[0, ends[place] - len(step.token_ids) : ends[place]])

    def _sample(self, plan: StepPlan, logits: torch.Tensor, seq_ids: list[int]) -> StepResult:
        """A token after each row of ``logits`` ``[len(seq_ids), V]``."""
        sampled = SampledTokens()
        if seq_ids:
            sampled = self._sampler.sample(logits.to(torch.float32, copy=True), seq_ids)
        errors = {**self._prompts.errors, **sampled.errors}
        self._model.scrub_failed(plan.sequences, errors)
        return StepResult(plan.step_id, sampled.token_ids, sampled.logprobs, errors, self._prompts.found)
