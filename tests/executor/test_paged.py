"""The packed step loop: every family equal to transformers alone, whatever is chunked, mixed, shared or preempted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microbatch.core.policies import ContinuousPolicy
from microbatch.core.request import Request, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.errors import OutOfMemoryError
from microbatch.executor.paged import PagedExecutor
from microbatch.executor.probe import attach, layer_specs
from microbatch.executor.run import PagedModel
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.store import KVStore
from tests.executor.tiny import FAMILIES, VOCAB, greedy_alone, tiny_model

CPU = torch.device("cpu")
BLOCK = 4
PROMPTS = [[5 + (i * 7 + k) % 80 for i in range(length)] for k, length in enumerate([1, 30, 3, 17, 8])]
COUNTS = [12, 3, 20, 1, 9]


def executor_for(model: Any, num_blocks: int = 128, eos: tuple[int, ...] = (2,)) -> PagedExecutor:
    backend = choose_backend("torch")
    specs = layer_specs(model)
    assert attach(model, specs, backend)
    return PagedExecutor(PagedModel(model, KVStore(specs, num_blocks, BLOCK), backend, CPU, VOCAB, 0), eos)


def make_scheduler(num_blocks: int = 128, budget: int = 2048, seqs: int = 8, prefix_cache: bool = True) -> Scheduler:
    kv = PagedKVManager(num_blocks, BLOCK, prefix_cache=prefix_cache)
    return Scheduler(kv, ContinuousPolicy(max_num_seqs=seqs), max_num_batched_tokens=budget)


def run(
    executor: PagedExecutor, s: Scheduler, *, stagger: int = 0, counts: list[int] = COUNTS, **params: Any
) -> list[Sequence]:
    """All prompts, the k-th one ``k * stagger`` steps later; the books are checked at every step."""
    coming = list(enumerate(zip(PROMPTS, counts, strict=True)))
    sequences, step = [], 0
    while coming or not s.idle:
        while coming and coming[0][0] * stagger <= step:
            k, (prompt, count) = coming.pop(0)
            sampling = SamplingParams(**{"max_tokens": count, "temperature": 0, **params})
            request = Request(f"{id(s)}-{k}-{step}", tuple(prompt), sampling, float(step))
            sequences += s.add(request, seed=k, max_total_tokens=len(prompt) + count)
        step += 1
        plan = s.schedule(float(step))
        if plan is not None:
            s.apply(executor.execute(plan), float(step))
            s.check_integrity()
    assert s.kv.num_free_blocks == s.kv.num_blocks
    return sequences


def expected(family: str, counts: list[int] = COUNTS) -> list[list[int]]:
    model = tiny_model(family)
    return [greedy_alone(model, p, c) for p, c in zip(PROMPTS, counts, strict=True)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_equals_transformers_alone(family: str) -> None:
    right = expected(family)
    executor = executor_for(tiny_model(family))
    for budget, stagger in ((2048, 0), (7, 0), (16, 3)):
        sequences = run(executor, make_scheduler(budget=budget), stagger=stagger)
        assert [s.output_token_ids for s in sequences] == right, f"budget {budget}, stagger {stagger}"


def test_preemption_and_prefix_hits_change_nothing() -> None:
    counts = [18] * 5
    right = expected("llama", counts)
    executor = executor_for(tiny_model("llama"))
    tight = make_scheduler(num_blocks=14, budget=9)
    assert [s.output_token_ids for s in run(executor, tight, counts=counts)] == right
    assert tight.counters.num_preemptions > 0
    shared = make_scheduler()
    run(executor, shared)
    assert [
        s.output_token_ids for s in run(executor, shared, counts=counts)
    ] == right and shared.counters.prefix_hit_tokens > 0


def test_seeded_sampling_is_the_same_in_any_schedule() -> None:
    executor = executor_for(tiny_model("llama"))
    fields: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5}
    schedules = (make_scheduler(), make_scheduler(seqs=1), make_scheduler(num_blocks=14, budget=9))
    outputs = [[s.output_token_ids for s in run(executor, s, counts=[18] * 5, **fields)] for s in schedules]
    assert schedules[2].counters.num_preemptions > 0
    assert outputs[0] == outputs[1] == outputs[2]


def test_out_of_memory_in_a_step_makes_steps_smaller_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = expected("llama")
    model = tiny_model("llama")
    executor = executor_for(model)
    forward, most = model.model.forward, 5

    def tight(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > most:
            raise torch.OutOfMemoryError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", tight)
    s = make_scheduler()
    coming = [Request(f"r{k}", tuple(p), SamplingParams(max_tokens=c, temperature=0), float(k))
              for k, (p, c) in enumerate(zip(PROMPTS, COUNTS, strict=True))]  # fmt: skip
    sequences = [
        s.add(r, seed=0, max_total_tokens=len(r.prompt_token_ids) + COUNTS[k])[0] for k, r in enumerate(coming)
    ]
    failures = 0
    while (plan := s.schedule(100.0)) is not None:
        try:
            result = executor.execute(plan)
        except OutOfMemoryError as error:
            failures += 1
            assert s.fail(error, 100.0) == []
        else:
            s.apply(result, 100.0)
        s.check_integrity()
    assert [q.output_token_ids for q in sequences] == right and 0 < failures < 20


def test_a_dense_model_is_refused() -> None:
    model = tiny_model("llama")
    specs = layer_specs(model)
    with pytest.raises(ValueError, match="packed forward"):
        PagedExecutor(PagedModel(model, KVStore(specs, 4, BLOCK), choose_backend(), CPU, VOCAB, 0, dense=True))
