"""The iteration-level executor: one packed forward a step, prefill chunks and decodes mixed, no padding.

``model(input_ids=[1, T], position_ids=[1, T])`` without a cache: the step's ``PagedStep`` travels in the keywords down
to our attention function, and ``logits_to_keep`` is an index, so the head runs only where a token is sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from microbatch.core.plan import SequenceStep, StepPlan, StepResult
from microbatch.errors import OutOfMemoryError
from microbatch.executor.attention import PagedStep
from microbatch.executor.run import PagedModel
from microbatch.executor.sampling import Sampler
from microbatch_kernels.attention_inputs import AttentionInputs


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """A step laid end to end, as ints: ``token_ids`` and ``positions`` ``[T]``, ``sampled`` the index of each last
    token that a token is sampled after, ``seq_ids`` whose it is."""

    token_ids: list[int]
    positions: list[int]
    sampled: list[int]
    seq_ids: list[int]

    @classmethod
    def build(cls, steps: Sequence[SequenceStep]) -> PackedInputs:
        """From the sequences of a plan, in their order."""
        inputs = cls([], [], [], [])
        for step in steps:
            inputs.token_ids.extend(step.token_ids)
            inputs.positions.extend(range(step.start, step.start + len(step.token_ids)))
            if step.samples:
                inputs.sampled.append(len(inputs.token_ids) - 1)
                inputs.seq_ids.append(step.seq_id)
        return inputs


class PagedExecutor:
    """Implements ``core.ports.Executor`` for policies that decide before every step."""

    def __init__(self, model: PagedModel, eos_token_ids: Collection[int] = ()) -> None:
        if model.dense:
            raise ValueError("the packed forward needs a model whose attention runs over the store")
        self._model = model
        self._sampler = Sampler(model.vocab_size, eos_token_ids, model.device)

    @property
    def model(self) -> PagedModel:
        """The model and its store."""
        return self._model

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward over everything that the plan feeds; a token for each sequence that samples."""
        self._sampler.release(plan.released)
        params = {s.seq_id: s.params for s in plan.sequences}
        for admitted in plan.admitted:
            self._sampler.admit(admitted, params[admitted.seq_id])
        try:
            self._model.move_blocks(plan)
            return self._forward(plan) if plan.sequences else StepResult(plan.step_id, {})
        except torch.OutOfMemoryError as error:
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()
            raise OutOfMemoryError(f"out of memory in a step of {plan.num_tokens} tokens: {error}") from None

    def reset(self) -> None:
        """Nothing is kept between steps but the sampling state, which the next plan releases."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def _forward(self, plan: StepPlan) -> StepResult:
        model, device = self._model, self._model.device
        packed = PackedInputs.build(plan.sequences)
        rows = [(s.block_ids, s.start, len(s.token_ids)) for s in plan.sequences]
        inputs = AttentionInputs.build(rows, model.store.block_size, device)
        keep = torch.tensor(packed.sampled or [0], device=device)
        output = model.model(
            input_ids=torch.tensor([packed.token_ids], device=device),
            position_ids=torch.tensor([packed.positions], device=device),
            use_cache=False,
            logits_to_keep=keep,
            paged=PagedStep(model.store, model.backend, inputs, packed=None),
        )
        if not packed.sampled:
            return StepResult(plan.step_id, {})
        logits = output.logits[0].to(torch.float32, copy=True)
        sampled = self._sampler.sample(logits, packed.seq_ids)
        model.scrub_failed(plan.sequences, sampled.errors)
        return StepResult(plan.step_id, sampled.token_ids, sampled.logprobs, sampled.errors)
