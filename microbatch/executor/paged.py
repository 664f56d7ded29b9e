"""The iteration-level executor: one packed forward a step, prefill chunks and decodes mixed, no padding.

``model(input_ids=[1, T], position_ids=[1, T])`` without a cache: the step's ``PagedStep`` travels in the keywords down
to our attention function, and ``logits_to_keep`` is an index, so the head runs only where a token is sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from microbatch.core.plan import SequenceStep, StepPlan, StepResult
from microbatch.executor.attention import PagedStep
from microbatch.executor.faults import memory_faults
from microbatch.executor.graphs import DecodeGraphs
from microbatch.executor.run import PagedModel
from microbatch.executor.sampling import Sampler
from microbatch_kernels.attention_inputs import AttentionInputs, upload


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
    """Implements ``core.ports.Executor`` for policies that decide before every step. Steps that fit ``graphs`` run
    through them."""

    def __init__(
        self, model: PagedModel, eos_token_ids: Collection[int] = (), graphs: DecodeGraphs | None = None
    ) -> None:
        if model.dense:
            raise ValueError("the packed forward needs a model whose attention runs over the store")
        self._model = model
        self._graphs = graphs
        self._sampler = Sampler(model.vocab_size, eos_token_ids, model.device)

    @property
    def model(self) -> PagedModel:
        """The model and its store."""
        return self._model

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward over everything that the plan feeds; a token for each sequence that samples."""
        self._sampler.release(plan.released)
        params = {s.seq_id: s.params for s in plan.sequences}
        with memory_faults(f"a step of {plan.num_tokens} tokens", self._model.device):
            for admitted in plan.admitted:
                self._sampler.admit(admitted, params[admitted.seq_id])
            self._model.move_blocks(plan)
            return self._forward(plan) if plan.sequences else StepResult(plan.step_id, {})

    def reset(self) -> None:
        """Nothing is kept between steps but the sampling state, which the next plan releases."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def _forward(self, plan: StepPlan) -> StepResult:
        if self._graphs is not None and self._graphs.fits(plan.sequences):
            return self._sample(plan, self._graphs.run(plan.sequences), [s.seq_id for s in plan.sequences])
        model, device = self._model, self._model.device
        packed = PackedInputs.build(plan.sequences)
        rows = [(s.block_ids, s.start, len(s.token_ids)) for s in plan.sequences]
        inputs = AttentionInputs.build(rows, model.store.block_size, device)
        output = model.model(
            input_ids=upload(packed.token_ids, device)[None],
            position_ids=upload(packed.positions, device)[None],
            use_cache=False,
            logits_to_keep=upload(packed.sampled or [0], device),
            paged=PagedStep(model.store, model.backend, inputs, packed=None),
        )
        if not packed.sampled:
            return StepResult(plan.step_id, {})
        return self._sample(plan, output.logits[0], packed.seq_ids)

    def _sample(self, plan: StepPlan, logits: torch.Tensor, seq_ids: list[int]) -> StepResult:
        """A token after each row of ``logits`` ``[len(seq_ids), V]``."""
        sampled = self._sampler.sample(logits.to(torch.float32, copy=True), seq_ids)
        self._model.scrub_failed(plan.sequences, sampled.errors)
        return StepResult(plan.step_id, sampled.token_ids, sampled.logprobs, sampled.errors)
