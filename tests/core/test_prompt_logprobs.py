"""Requests that want log-probabilities of their prompt, and those that want nothing else: what is planned for them."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.core.plan import StepPlan
from microbatch.core.policies import ContinuousPolicy, WindowPolicy
from microbatch.core.policy import Policy
from microbatch.core.request import FinishReason
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.errors import ExecutionError
from microbatch.executor.fake import FakeExecutor, prompt_scores
from tests.core.factory import request, scheduler


def continuous(**options: Any) -> Scheduler:
    return scheduler(policy=ContinuousPolicy(max_num_seqs=8), **options)


def add(s: Scheduler, name: str, prompt: int | list[int], arrival: float = 0.0, **params: Any) -> list[Sequence]:
    r = request(name, prompt, arrival, **{"max_tokens": 3, **params})
    assert r.params.max_tokens is not None
    return s.add(r, seed=1, max_total_tokens=len(r.prompt_token_ids) + r.params.max_tokens)


def run(s: Scheduler, executor: FakeExecutor | None = None) -> list[StepPlan]:
    """To the end; the books are checked at every step."""
    executor = executor or FakeExecutor(block_size=s.kv.block_size)
    plans = []
    while (plan := s.schedule(1.0)) is not None:
        plans.append(plan)
        s.apply(executor.execute(plan), 1.0)
        s.check_integrity()
    assert s.idle and s.kv.num_free_blocks == s.kv.num_blocks
    return plans


def right(sequence: Sequence) -> list[Any]:
    return list(prompt_scores(sequence.request.prompt_token_ids[1:], 0))


@pytest.mark.parametrize("budget", [2, 3, 5, 2048])
def test_chunks_of_a_prompt_are_scored_in_order(budget: int) -> None:
    s = continuous(max_num_batched_tokens=budget)
    scored = [add(s, "a", 13, prompt_logprobs=1)[0], add(s, "b", 1, 0.1, prompt_logprobs=0)[0]]
    plain = add(s, "c", 9, 0.2)[0]
    run(s)
    assert [q.prompt_logprobs for q in scored] == [right(q) for q in scored] and len(right(scored[0])) == 12
    assert plain.prompt_logprobs == []


@pytest.mark.parametrize("policy", [ContinuousPolicy(max_num_seqs=8), WindowPolicy(max_batch_size=4, window_ms=0)])
def test_a_prompt_that_is_scored_is_computed_whole_and_cached_for_others(policy: Policy) -> None:
    s, executor = scheduler(policy=policy), FakeExecutor(block_size=4)
    prompt = [20 + i for i in range(12)]
    add(s, "a", prompt)
    run(s, executor)
    queries = s.counters.prefix_query_tokens
    (again,) = add(s, "b", prompt, prompt_logprobs=2)
    assert run(s, executor)[0].sequences[0].start == 0 and again.num_cached_tokens == 0
    assert again.prompt_logprobs == right(again) and s.counters.prefix_query_tokens == queries
    (last,) = add(s, "c", prompt)
    run(s, executor)
    assert last.num_cached_tokens == 8


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_a_preempted_prompt_loses_no_score(num_host_blocks: int) -> None:
    s = continuous(num_blocks=7, max_num_batched_tokens=3, num_host_blocks=num_host_blocks)
    sequences = [add(s, str(k), 11, k / 10, max_tokens=9, prompt_logprobs=1)[0] for k in range(3)]
    run(s)
    assert s.counters.num_preemptions > 0
    assert [q.prompt_logprobs for q in sequences] == [right(q) for q in sequences]
    assert {len(q.output_token_ids) for q in sequences} == {9}


@pytest.mark.parametrize("length", [3, 14])
def test_the_first_choice_scores_for_all(length: int) -> None:
    s = continuous(max_num_batched_tokens=5)
    choices = add(s, "a", length, n=3, prompt_logprobs=1)
    plans = run(s)
    assert [q.prompt_logprobs for q in choices] == [right(choices[0]), [], []]
    assert {q.seq_id for q in plans[0].sequences} == {choices[0].seq_id}, "no answer before the prompt is scored"
    assert s.counters.forked_tokens == 2 * (length - 1)


def test_the_other_choices_do_not_wait_for_a_first_one_that_failed() -> None:
    s = continuous()
    choices = add(s, "a", 9, n=2, prompt_logprobs=1)
    failing = FakeExecutor(block_size=4, row_errors=lambda plan: {choices[0].seq_id: "not a number"})
    run(s, failing)
    assert [q.finish_reason for q in choices] == [FinishReason.ERROR, FinishReason.LENGTH]


@pytest.mark.parametrize("policy", [ContinuousPolicy(max_num_seqs=8), WindowPolicy(max_batch_size=4, window_ms=0)])
@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_generated_after_a_prompt_alone(policy: Policy, n: int) -> None:
    s = scheduler(policy=policy, max_num_batched_tokens=6)
    choices = add(s, "a", 9, max_tokens=0, prompt_logprobs=1, n=n)
    neighbour = add(s, "b", 4, 0.1)[0]
    executor = FakeExecutor(block_size=4)
    deltas = []
    while (plan := s.schedule(1.0)) is not None:
        result = executor.execute(plan)
        assert not {q.seq_id for q in choices} & set(result.token_ids)
        deltas += s.apply(result, 1.0)
    assert [q.output_token_ids for q in choices] == [[]] * n and choices[0].prompt_logprobs == right(choices[0])
    ends = [d for d in deltas if d.seq_id in {q.seq_id for q in choices}]
    assert [(d.token_id, d.finish_reason, d.error) for d in ends] == [(None, FinishReason.LENGTH, None)] * n
    assert len(neighbour.output_token_ids) == 3 and s.idle


def test_an_error_ends_a_prompt_alone_too() -> None:
    s = continuous()
    (sequence,) = add(s, "a", 9, max_tokens=0)
    plan = s.schedule(1.0)
    assert plan is not None
    failing = FakeExecutor(block_size=4, row_errors=lambda plan: {sequence.seq_id: "not a number"})
    (delta,) = s.apply(failing.execute(plan), 1.0)
    assert delta.finish_reason is FinishReason.ERROR and isinstance(delta.error, ExecutionError)
