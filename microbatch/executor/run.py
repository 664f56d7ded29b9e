"""One ``model.generate`` in progress: its thread's side and the side that hands it plans."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from microbatch.core.plan import SequenceStep, StepPlan, StepResult
from microbatch.core.ports import Forms
from microbatch.executor.attention import PagedStep
from microbatch.executor.cache import DenseCache, PagedCache
from microbatch.executor.padding import PaddedBatch
from microbatch.executor.prompt_scores import PromptScores
from microbatch.executor.sampling import SampledTokens, Sampler
from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.host_pool import HostPool
from microbatch_kernels.metadata import slot_mapping
from microbatch_kernels.store import KVStore

#: ``generate`` wants a bound; the scheduler ends every sequence long before.
_UNBOUNDED = 2**20


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A model with the store that holds its K/V. ``dense``: its own attention over a dense gather (see
    ``DenseCache``). ``host``: memory for blocks that are swapped out."""

    model: Any
    store: KVStore
    backend: AttentionBackend
    device: torch.device
    vocab_size: int
    pad_token_id: int
    dense: bool = False
    host: HostPool | None = None

    def move_blocks(self, plan: StepPlan) -> None:
        """Copy the blocks that the plan names; before anything of it is written."""
        if plan.swap_out or plan.swap_in:
            if self.host is None:
                raise ValueError(f"step {plan.step_id} swaps blocks, but there is no host memory for them")
            self.host.swap_out(plan.swap_out)
            self.host.swap_in(plan.swap_in)
        if plan.copies:
            self.store.copy_blocks(plan.copies)

    def scrub_failed(self, steps: Sequence[SequenceStep], errors: Collection[int]) -> None:
        """Wipe what is not a number from the blocks of the sequences that failed, before others get them."""
        for step in steps:
            if step.seq_id in errors:
                self.store.scrub(step.block_ids)


class BatchEnded(Exception):
    """Raised inside ``generate`` to leave it when its batch is over."""


class GenerateRun:
    """A batch from its first plan to its last. ``generate`` runs in one thread, ``wait``, ``advance`` and ``stop`` are
    called from another; they meet in two queues that hold at most one item each."""

    def __init__(self, model: PagedModel, plan: StepPlan, eos_token_ids: Collection[int], forms: Forms | None) -> None:
        self._model = model
        self._plan = plan
        self._rows = {s.seq_id: row for row, s in enumerate(plan.sequences)}
        self._sampler = Sampler(model.vocab_size, eos_token_ids, model.device, forms)
        self._prompts = PromptScores(model.model, model.vocab_size)
        self._prompts.follow(plan)
        for admitted, step in zip(plan.admitted, plan.sequences, strict=True):
            self._sampler.admit(admitted, step.params)
        batch = PaddedBatch.build(plan.sequences, model.pad_token_id)
        self._batch = batch
        cache_class = DenseCache if model.dense else PagedCache
        self._cache = cache_class(len(model.store.layers), batch.prefix_columns)
        self._watching = ExitStack()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self.ended = threading.Event()

    # ---- the side that plans

    def wait(self) -> StepResult:
        """The result of the plan that runs; raises what ``generate`` raised."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def advance(self, plan: StepPlan) -> StepResult:
        """Hand in the next plan and wait for its token."""
        if self.ended.is_set():
            raise RuntimeError("the batch has ended")
        self._plans.put(plan)
        return self.wait()

    def stop(self) -> None:
        """End ``generate`` and wait until it has let go of its tensors."""
        self._plans.put(None)
        self.ended.wait()

    # ---- the side of generate

    def generate(self) -> None:
        """Run the whole batch. Ends by ``BatchEnded`` when the planning side stops it."""
        model, device = self._model, self._model.device
        self._prepare(self._plan.sequences, self._batch.packed)
        if isinstance(self._cache, DenseCache):
            slots = self._batch.slots(self._plan.sequences, model.store.block_size)
            self._cache.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        with self._watching:
            if self._prompts.wanted(self._plan.sequences):
                self._watching.enter_context(self._prompts.watch())
            self._generate()

    def _generate(self) -> None:
        model, device = self._model, self._model.device
        model.model.generate(
            torch.tensor(self._batch.input_ids, device=device),
            attention_mask=torch.tensor(self._batch.attention_mask, device=device),
            cache=self._cache,
            generation_config=_greedy_config(model.pad_token_id),
            logits_processor=LogitsProcessorList([_Choose(self)]),
            stopping_criteria=StoppingCriteriaList([_NextPlan(self)]),
        )

    def fail(self, error: BaseException) -> None:
        """``generate`` raised: the planning side gets the error in the place of a result."""
        self._results.put(error)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample the live rows of ``logits`` ``[B, V]`` and mark each choice so that ``generate``'s argmax takes it."""
        steps = self._plan.sequences
        self._score(steps, logits)
        rows = torch.tensor([self._rows[s.seq_id] for s in steps], device=logits.device)
        sampled = self._sampler.sample(logits if len(steps) == len(logits) else logits[rows], [s.seq_id for s in steps])
        choices = torch.full((len(logits), 1), self._model.pad_token_id, dtype=torch.int64)
        for seq_id, token_id in sampled.token_ids.items():
            choices[self._rows[seq_id]] = token_id
        for step in steps:
            if not step.samples:  # its prompt was all that was wanted
                sampled.token_ids.pop(step.seq_id, None)
        sampled.errors.update(self._prompts.errors)
        self._model.scrub_failed(steps, sampled.errors)
        self._sampled = sampled
        return logits.zero_().scatter_(1, choices.to(logits.device), 1.0)

    def _score(self, steps: Sequence[SequenceStep], logits: torch.Tensor) -> None:
        """The prompts that are to be scored: in the first forward, which computes all prompts."""
        prompts, hidden = self._prompts, self._prompts.hidden
        wanted = prompts.wanted(steps)
        supported = bool(wanted) and prompts.check(None if hidden is None else hidden[0, -1], logits[0])
        for place in wanted:
            step = steps[place]
            if hidden is None or not supported:
                prompts.refuse(step)
            else:
                prompts.score(step, hidden[self._rows[step.seq_id], -len(step.token_ids) :])
        self._watching.close()

    def next_plan(self) -> None:
        """Give out the tokens, wait for the next plan, lay out its forward."""
        sampled: SampledTokens = self._sampled
        step_id = self._plan.step_id
        found = self._prompts.found
        self._results.put(StepResult(step_id, sampled.token_ids, sampled.logprobs, sampled.errors, found))
        plan = self._plans.get()
        if plan is None:
            raise BatchEnded
        self._plan = plan
        self._sampler.release(plan.released)
        self._prompts.follow(plan)
        rows = [self._rows[s.seq_id] for s in plan.sequences]
        self._prepare(plan.sequences, None if rows == list(self._rows.values()) else rows)
        if isinstance(self._cache, DenseCache):
            column = torch.zeros(len(self._rows), 1, dtype=torch.int64)
            for row, step in zip(rows, plan.sequences, strict=True):
                column[row] = slot_mapping(step.block_ids, step.start, 1, self._model.store.block_size)[0]
            self._cache.slots = torch.cat([self._cache.slots, column.to(self._cache.slots.device)], dim=1)

    def _prepare(self, steps: Sequence[SequenceStep], packed: list[int] | None) -> None:
        store, device = self._model.store, self._model.device
        rows = [(s.block_ids, s.start, len(s.token_ids)) for s in steps]
        inputs = AttentionInputs.build(rows, store.block_size, device)
        index = None if packed is None else torch.tensor(packed, dtype=torch.int64, device=device)
        self._cache.step = PagedStep(store, self._model.backend, inputs, index)


class _Choose(LogitsProcessor):
    """Our sampler in the place of ``generate``'s."""

    def __init__(self, run: GenerateRun) -> None:
        self._run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._run.choose(scores)


class _NextPlan(StoppingCriteria):
    """The point at which ``generate`` waits for the engine between two tokens. It never stops by itself."""

    def __init__(self, run: GenerateRun) -> None:
        self._run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._run.next_plan()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _greedy_config(pad_token_id: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=_UNBOUNDED, do_sample=False, num_beams=1, pad_token_id=pad_token_id, use_cache=True
    )
