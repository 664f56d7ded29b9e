"""``model.generate`` over the paged store: every family, every mix of lengths, equal to transformers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microbatch.core.plan import Admitted, StepPlan
from microbatch.core.policies import WindowPolicy
from microbatch.core.request import FinishReason, Request, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.errors import OutOfMemoryError, SetupError
from microbatch.executor.generate import GenerateExecutor
from microbatch.executor.kv_shapes import cached_specs
from microbatch.executor.probe import attach, layer_specs
from microbatch.executor.run import PagedModel
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.store import KVStore
from tests.executor.tiny import FAMILIES, FOREIGN, VOCAB, greedy_alone, tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5 + (i * 7 + k) % 80 for i in range(length)] for k, length in enumerate([1, 30, 3, 17, 8])]
BLOCK = 4


def executor_for(
    model: Any, num_blocks: int = 128, *, expect_paged: bool = True, backend: str = "torch"
) -> GenerateExecutor:
    chosen = choose_backend(backend)
    specs = layer_specs(model)
    assert attach(model, specs, chosen) is expect_paged
    store = KVStore(specs if expect_paged else cached_specs(model), num_blocks, BLOCK)
    return GenerateExecutor(PagedModel(model, store, chosen, CPU, VOCAB, 0, dense=not expect_paged), [2])


def run(
    executor: GenerateExecutor,
    prompts: list[list[int]],
    counts: list[int],
    *,
    batch: int = 8,
    num_blocks: int = 128,
    prefix_cache: bool = True,
    scheduler: Scheduler | None = None,
    **params: Any,
) -> list[Sequence]:
    """All prompts through a scheduler over the executor; checks the books at every step."""
    s = scheduler or Scheduler(
        PagedKVManager(num_blocks, BLOCK, prefix_cache=prefix_cache), WindowPolicy(max_batch_size=batch, window_ms=0)
    )
    sequences = []
    for k, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        sampling = SamplingParams(**{"max_tokens": count, "temperature": 0, **params})
        request = Request(f"{s.counters.prefix_query_tokens}-{k}", tuple(prompt), sampling, float(k))
        sequences += s.add(request, seed=k, max_total_tokens=len(prompt) + count)
    while (plan := s.schedule(100.0)) is not None:
        s.apply(executor.execute(plan), 100.0)
        s.check_integrity()
    assert s.idle and s.kv.num_free_blocks == s.kv.num_blocks
    return sequences


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_equals_transformers_alone(family: str) -> None:
    counts = [12, 3, 20, 1, 9]
    expected = [greedy_alone(tiny_model(family), p, c) for p, c in zip(PROMPTS, counts, strict=True)]
    executor = executor_for(tiny_model(family))
    try:
        for batch in (5, 2, 1):
            sequences = run(executor, PROMPTS, counts, batch=batch)
            assert [s.output_token_ids for s in sequences] == expected, f"batch {batch}"
    finally:
        executor.close()


@pytest.mark.parametrize("family", sorted(FOREIGN))
def test_a_model_whose_attention_cannot_be_replaced_runs_over_the_dense_gather(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts = [12, 3, 20, 1, 9]
    expected = [greedy_alone(tiny_model(family), p, c) for p, c in zip(PROMPTS, counts, strict=True)]
    executor = executor_for(tiny_model(family), expect_paged=False)
    try:
        sequences = run(executor, PROMPTS, counts, batch=5, prefix_cache=False)
        assert [s.output_token_ids for s in sequences] == expected
        again = run(executor, PROMPTS, counts, batch=2, prefix_cache=False)
        assert [s.output_token_ids for s in again] == expected
    finally:
        executor.close()


def test_shared_prefixes_and_preemption_change_nothing() -> None:
    shared = [7 + i % 50 for i in range(13)]
    prompts = [shared + p for p in PROMPTS]
    counts = [18, 18, 18, 18, 18]
    expected = [greedy_alone(tiny_model("llama"), p, c) for p, c in zip(prompts, counts, strict=True)]
    executor = executor_for(tiny_model("llama"))
    try:
        kv = PagedKVManager(30, BLOCK)
        s = Scheduler(kv, WindowPolicy(max_batch_size=5, window_ms=0))
        first = run(executor, prompts, counts, scheduler=s)
        assert [q.output_token_ids for q in first] == expected
        assert s.counters.num_preemptions > 0
        second = run(executor, prompts, counts, scheduler=s)
        assert [q.output_token_ids for q in second] == expected and s.counters.prefix_hit_tokens > 0
    finally:
        executor.close()


def test_seeded_sampling_does_not_depend_on_the_batch_or_on_preemption() -> None:
    executor = executor_for(tiny_model("llama"))
    try:
        counts = [15] * 5
        alone = run(executor, PROMPTS, counts, batch=1, temperature=0.9, top_p=0.9, frequency_penalty=0.5)
        together = run(executor, PROMPTS, counts, batch=5, temperature=0.9, top_p=0.9, frequency_penalty=0.5)
        tight = Scheduler(PagedKVManager(20, BLOCK), WindowPolicy(max_batch_size=5, window_ms=0))
        preempted = run(executor, PROMPTS, counts, scheduler=tight, temperature=0.9, top_p=0.9, frequency_penalty=0.5)
        assert tight.counters.num_preemptions > 0
        outputs = [[s.output_token_ids for s in sequences] for sequences in (alone, together, preempted)]
        assert outputs[0] == outputs[1] == outputs[2]
    finally:
        executor.close()


def test_a_row_of_nan_leaves_nothing_behind_for_the_next_owner_of_its_blocks() -> None:
    model = tiny_model("llama")
    executor = executor_for(model)
    store = executor.model.store
    try:
        weight = model.model.embed_tokens.weight
        kept = weight[90].clone()
        weight[90] = float("nan")
        bad, good = run(executor, [[90, 5, 6], PROMPTS[3]], [8, 8], prefix_cache=False)
        assert bad.finish_reason is FinishReason.ERROR
        assert good.output_token_ids == greedy_alone(tiny_model("llama"), PROMPTS[3], 8)
        assert all(torch.isfinite(pool).all() for pool in store.pools)
        weight[90] = kept
        (after,) = run(executor, PROMPTS[:1], [12], prefix_cache=False)
        assert after.output_token_ids == greedy_alone(tiny_model("llama"), PROMPTS[0], 12)
    finally:
        executor.close()


def test_pads_are_never_stored() -> None:
    executor = executor_for(tiny_model("llama"))
    store = executor.model.store
    try:
        run(executor, PROMPTS, [4] * 5, batch=5, prefix_cache=False)
        assert all(pool[0].eq(0).all() for pool in store.pools), "something was written to the null block"
        written = int(store.kv[0].keys.abs().sum((-1, -2)).ne(0).sum())
        assert written == sum(len(p) + 3 for p in PROMPTS), "exactly the tokens fed are stored, one slot each"
    finally:
        executor.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_rows_stay_finite_beside_much_padding(dtype: torch.dtype) -> None:
    executor = executor_for(tiny_model("llama", dtype))
    try:
        sequences = run(executor, [[5], [6 + i % 60 for i in range(65)]], [8, 8], batch=2)
        assert all(len(s.output_token_ids) == 8 and s.finish_reason is not None for s in sequences)
    finally:
        executor.close()


def begin(executor: GenerateExecutor, **fields: Any) -> StepPlan:
    from microbatch.core.plan import SequenceStep

    params = SamplingParams(temperature=0)
    step = SequenceStep(0, (5, 6), 0, (1,), True, params)
    plan = StepPlan(0, (step,), (Admitted(0, (5, 6), (), 0),), num_rows=1, **fields)
    executor.execute(plan)
    return plan


def test_a_model_that_raises_fails_the_step_and_the_next_batch_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    executor = executor_for(model)
    try:
        forward, calls = model.model.forward, []

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("boom")
            if len(calls) == 6:
                raise torch.OutOfMemoryError("no memory")
            return forward(*args, **kwargs)

        monkeypatch.setattr(model.model, "forward", sometimes)
        with pytest.raises(ValueError, match="boom"):
            run(executor, PROMPTS, [9] * 5)
        with pytest.raises(OutOfMemoryError, match="batch of 5"):
            run(executor, PROMPTS, [9] * 5)
        monkeypatch.undo()
        assert run(executor, PROMPTS[:1], [5])[0].output_token_ids == greedy_alone(tiny_model("llama"), PROMPTS[0], 5)
    finally:
        executor.close()


def test_reset_and_close_end_a_batch_that_waits() -> None:
    executor = executor_for(tiny_model("llama"))
    begin(executor)
    executor.reset()
    executor.reset()
    begin(executor)
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.execute(StepPlan(1, ()))


def test_a_plan_that_continues_nothing_is_refused() -> None:
    executor = executor_for(tiny_model("llama"))
    try:
        plan = begin(executor)
        executor.execute(StepPlan(1, (), released=(0,)))
        with pytest.raises(RuntimeError, match="none runs"):
            executor.execute(StepPlan(2, plan.sequences))
    finally:
        executor.close()


def test_a_model_that_gives_wrong_logits_both_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    specs = layer_specs(model)
    from microbatch.executor import probe

    monkeypatch.setattr(probe, "_dense_logits", lambda model, rows: torch.ones(2, VOCAB))
    with pytest.raises(SetupError, match="logits differ"):
        attach(model, specs, choose_backend("torch"))
