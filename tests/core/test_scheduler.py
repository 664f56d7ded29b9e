"""The scheduler by hand: plans, ends, blocks, faults, deadlines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from microbatch.core.counters import SchedulerCounters
from microbatch.core.plan import StepPlan, StepResult, TokenLogprobs
from microbatch.core.policies import ContinuousPolicy, WindowPolicy
from microbatch.core.request import FinishReason
from microbatch.core.scheduler import Scheduler
from microbatch.errors import (
    DeadlineError,
    ExecutionError,
    OutOfMemoryError,
    QueueDeadlineError,
)
from tests.core.factory import EOS, add, request, scheduler, serial


def plan_of(s: Scheduler, now: float = 1.0) -> StepPlan:
    plan = s.schedule(now)
    s.check_integrity()
    assert plan is not None
    return plan


def step(s: Scheduler, tokens: dict[int, int] | int, now: float = 1.0) -> StepPlan:
    """One whole step; ``tokens`` by seq_id, or one token for all."""
    plan = plan_of(s, now)
    given = {q.seq_id: tokens if isinstance(tokens, int) else tokens[q.seq_id] for q in plan.sequences}
    s.apply(StepResult(plan.step_id, given), now)
    s.check_integrity()
    return plan


def test_the_first_plan_feeds_prompts_the_next_ones_single_tokens() -> None:
    s = scheduler()
    add(s, request("a", 5))
    add(s, request("b", 3))
    plan = step(s, 9)
    assert [(q.seq_id, q.start, len(q.token_ids), len(q.block_ids)) for q in plan.sequences] == [
        (0, 0, 5, 2),
        (1, 0, 3, 1),
    ]
    assert [a.seq_id for a in plan.admitted] == [0, 1] and plan.num_rows == 2 and plan.reason == "window"
    assert plan.useful_token_ratio == 8 / 10
    plan = step(s, 9)
    assert [(q.start, q.token_ids) for q in plan.sequences] == [(5, (9,)), (3, (9,))]
    assert plan.admitted == () and plan.reason == "" and plan.useful_token_ratio == 1.0


def test_a_row_that_ends_frees_its_blocks_in_mid_batch() -> None:
    s = scheduler(prefix_cache=False)
    add(s, request("a", 5))
    add(s, request("b", 5))
    step(s, 9)
    used = s.kv.num_blocks - s.kv.num_free_blocks
    step(s, {0: EOS, 1: 9})
    assert s.kv.num_blocks - s.kv.num_free_blocks == used - 2
    plan = step(s, 9)
    assert plan.released == (0,) and [q.seq_id for q in plan.sequences] == [1] and plan.num_rows == 2
    assert plan.useful_token_ratio == 0.5


def test_nothing_joins_a_batch_that_runs() -> None:
    s = scheduler()
    add(s, request("a"))
    step(s, 9)
    add(s, request("b"))
    assert [q.seq_id for q in step(s, 9, 99.0).sequences] == [0]
    assert s.num_waiting == 1


def test_the_end_of_a_batch_is_told_to_the_executor() -> None:
    s = serial()
    add(s, request("a", max_tokens=1))
    step(s, 9)
    assert not s.idle
    plan = plan_of(s)
    assert plan.sequences == () and plan.released == (0,)
    s.apply(StepResult(plan.step_id, {}), 1.0)
    assert s.idle and s.schedule(1.0) is None and s.wake_at is None


def test_a_new_batch_carries_the_releases_of_the_old_one() -> None:
    s = serial()
    add(s, request("a", max_tokens=1))
    add(s, request("b"))
    step(s, 9)
    plan = plan_of(s)
    assert plan.released == (0,) and [a.seq_id for a in plan.admitted] == [1]


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "shown"),
    [
        ({}, [9, EOS], FinishReason.STOP, [9]),
        ({"max_tokens": 2}, [9, 8], FinishReason.LENGTH, [9, 8]),
        ({"max_tokens": 2}, [9, EOS], FinishReason.STOP, [9]),
        ({"ignore_eos": True, "max_tokens": 2}, [EOS, EOS], FinishReason.LENGTH, [EOS, EOS]),
        ({"stop_token_ids": (8,)}, [9, 8], FinishReason.STOP, [9]),
        ({"stop_token_ids": (8,), "ignore_eos": True}, [EOS, 8], FinishReason.STOP, [EOS]),
    ],
)
def test_why_a_sequence_ends(params: dict[str, Any], tokens: list[int], reason: FinishReason, shown: list[int]) -> None:
    s = serial()
    (sequence,) = add(s, request("a", **params))
    seen = []
    for token in tokens:
        plan = plan_of(s)
        (delta,) = s.apply(StepResult(plan.step_id, {0: token}, {0: TokenLogprobs(-1.0)}), 1.0)
        assert (delta.logprobs is None) == (delta.token_id is None)
        seen += [] if delta.token_id is None else [delta.token_id]
    assert delta.finish_reason is reason is sequence.finish_reason and seen == shown
    assert sequence.output_token_ids == tokens and s.kv.num_free_blocks == s.kv.num_blocks


def test_choices_get_their_own_seeds_and_the_first_keeps_the_requests() -> None:
    s = scheduler()
    sequences = add(s, request("a", n=3), seed=7)
    assert sequences[0].seed == 7 and len({q.seed for q in sequences}) == 3
    assert [q.index for q in sequences] == [0, 1, 2]
    again = add(scheduler(), request("a", n=3), seed=7)
    assert [q.seed for q in again] == [q.seed for q in sequences]


def test_abort_in_every_state() -> None:
    s = serial()
    for name in "abc":
        add(s, request(name))
    (delta,) = s.abort("b", 1.0)
    assert delta.finish_reason is FinishReason.ABORT and delta.error is None
    step(s, 9)
    (delta,) = s.abort("a", 1.0)
    assert delta.seq_id == 0
    assert s.abort("a", 1.0) == [] == s.abort("never", 1.0)
    plan = plan_of(s)
    assert plan.released == (0,) and [q.seq_id for q in plan.sequences] == [2]


def test_a_sequence_that_left_while_its_step_ran_takes_no_token() -> None:
    s = scheduler()
    add(s, request("a"))
    add(s, request("b"))
    plan = plan_of(s)
    s.abort("a", 1.0)
    deltas = s.apply(StepResult(plan.step_id, {0: 9, 1: 9}), 1.0)
    assert [d.seq_id for d in deltas] == [1]


def test_an_error_of_one_row_leaves_the_others() -> None:
    s = scheduler()
    add(s, request("a"))
    add(s, request("b"))
    plan = plan_of(s)
    bad, good = s.apply(StepResult(plan.step_id, {1: 9}, {}, {0: "NaN"}), 1.0)
    assert bad.finish_reason is FinishReason.ERROR and isinstance(bad.error, ExecutionError) and "NaN" in str(bad.error)
    assert good.token_id == 9 and good.finish_reason is None
    s.check_integrity()


def test_a_missing_token_is_an_error_not_a_hang() -> None:
    s = serial()
    add(s, request("a"))
    plan = plan_of(s)
    (delta,) = s.apply(StepResult(plan.step_id, {}), 1.0)
    assert isinstance(delta.error, ExecutionError)


def test_a_result_of_another_step_is_refused() -> None:
    s = serial()
    add(s, request("a"))
    plan = plan_of(s)
    with pytest.raises(ValueError, match="does not belong"):
        s.apply(StepResult(plan.step_id + 1, {0: 9}), 1.0)


def test_a_fault_of_the_step_ends_its_sequences_and_the_next_batch_works() -> None:
    s = scheduler()
    add(s, request("a"))
    add(s, request("b"))
    plan_of(s)
    deltas = s.fail(RuntimeError("boom"), 1.0)
    assert [d.finish_reason for d in deltas] == [FinishReason.ERROR] * 2
    s.check_integrity()
    add(s, request("c", arrival=1.0))
    assert [a.seq_id for a in plan_of(s, 2.0).admitted] == [2]


def test_out_of_memory_halves_the_batch_until_one_does_not_fit_alone() -> None:
    s = scheduler()
    for name in "abcd":
        add(s, request(name))
    sizes, ended = [], []
    while (plan := s.schedule(1.0)) is not None:
        if not plan.sequences:
            s.apply(StepResult(plan.step_id, {}), 1.0)
            continue
        sizes.append(len(plan.sequences))
        ended += s.fail(OutOfMemoryError("full"), 1.0)
        s.check_integrity()
    assert sizes[:3] == [4, 2, 1] and len(ended) == 4
    assert all(isinstance(d.error, OutOfMemoryError) for d in ended) and s.kv.num_free_blocks == s.kv.num_blocks


def test_out_of_memory_once_loses_nothing() -> None:
    s = scheduler()
    sequences = [add(s, request(name, max_tokens=2))[0] for name in "abcd"]
    plan_of(s)
    assert s.fail(OutOfMemoryError("full"), 1.0) == []
    for _ in range(8):
        if not all(q.finished for q in sequences):
            step(s, 9)
    assert [q.output_token_ids for q in sequences] == [[9, 9]] * 4


def test_preemption_goes_by_age_and_resumes_with_its_output() -> None:
    s = scheduler(num_blocks=6, policy=WindowPolicy(max_batch_size=2, window_ms=0), prefix_cache=False)
    old, young = (add(s, request(name, 8, max_tokens=8))[0] for name in "ab")
    for token in range(100, 105):
        step(s, token)
    assert young.num_preemptions == 0
    while not old.finished:
        step(s, 105)
    assert old.num_preemptions == 0 and young.num_preemptions == 1
    kept = list(young.output_token_ids)
    plan = plan_of(s)
    assert plan.admitted[0].output_token_ids == tuple(kept)
    assert plan.sequences[0].token_ids == young.request.prompt_token_ids + tuple(kept) and plan.sequences[0].start == 0
    assert s.counters.num_preemptions == 1


def test_a_preempted_sequence_comes_before_later_arrivals() -> None:
    s = scheduler(num_blocks=6, policy=WindowPolicy(max_batch_size=2, window_ms=0), prefix_cache=False)
    add(s, request("a", 8, 0.0))
    young = add(s, request("b", 8, 0.1))[0]
    step(s, 9)
    add(s, request("c", 8, 0.2))
    while not young.num_preemptions:
        step(s, 9)
    assert [q.request.request_id for q in s.waiting] == ["b", "c"]


def test_memory_cuts_the_batch_and_is_the_reason() -> None:
    s = scheduler(num_blocks=5, policy=WindowPolicy(max_batch_size=4, window_ms=0), prefix_cache=False)
    for name in "abc":
        add(s, request(name, 8))
    plan = plan_of(s)
    assert len(plan.sequences) == 2 and plan.reason == "memory" and s.num_waiting == 1


def test_what_can_never_run_is_ended_not_kept_waiting() -> None:
    s = scheduler(num_blocks=2)
    add(s, request("big", 40))
    add(s, request("small", 4, 0.1, max_tokens=1))
    assert s.schedule(1.0) is None
    (delta,) = s.take_deltas()
    assert isinstance(delta.error, ExecutionError) and "needs 10 K/V blocks" in str(delta.error)
    assert s.take_deltas() == []
    assert len(plan_of(s).sequences) == 1


def test_deadlines_of_waiting_and_running_requests() -> None:
    s = serial()
    add(s, request("a", options={"deadline": 5.0}))
    add(s, request("b", options={"queue_deadline": 3.0}))
    add(s, request("c", options={"queue_deadline": 30.0, "deadline": 40.0}))
    step(s, 9, 1.0)
    assert s.wake_at == 3.0
    step(s, 9, 3.0)
    (delta,) = s.take_deltas()
    assert type(delta.error) is QueueDeadlineError and delta.error.status == 503
    plan = plan_of(s, 5.0)
    (delta,) = s.take_deltas()
    assert type(delta.error) is DeadlineError and delta.error.status == 504 and plan.released == (0,)
    assert [q.seq_id for q in plan.sequences] == [2] and s.wake_at == 40.0


def test_prefix_hits_are_counted_and_never_cover_the_whole_prompt() -> None:
    s = serial(block_size=4)
    for name in ("a", "b"):
        (sequence,) = add(s, request(name, 8, max_tokens=1))
        plan = step(s, 9)
        plan = plan if plan.sequences else step(s, 9)
    assert sequence.num_cached_tokens == 4 and plan.sequences[0].start == 4
    assert (s.counters.prefix_query_tokens, s.counters.prefix_hit_tokens) == (16, 4)


def test_pinned_prompt_is_matched_later_even_without_a_prefix_cache() -> None:
    s = serial(prefix_cache=False)
    add(s, request("before", 5, max_tokens=1))
    s.add(request("pin", 9, max_tokens=1), seed=0, max_total_tokens=10, pin_prompt=True)
    step(s, 9)
    step(s, 9)
    step(s, 9)
    (sequence,) = add(s, request("b", 10, max_tokens=1))
    step(s, 9)
    assert sequence.num_cached_tokens == 8
    assert s.kv.num_blocks - s.kv.num_free_blocks == 2


def test_a_prompt_to_pin_closes_its_batch_at_once() -> None:
    s = scheduler(policy=WindowPolicy(max_batch_size=4, window_ms=50))
    add(s, request("other", 5, arrival=1.0))
    assert s.schedule(1.0) is None and s.wake_at == 1.05
    s.add(request("pin", 9, arrival=1.01, max_tokens=1), seed=0, max_total_tokens=10, pin_prompt=True)
    plan = s.schedule(1.01)
    assert plan is not None and (len(plan.sequences), plan.reason) == (2, "idle")


def test_abort_all_and_repr() -> None:
    s = scheduler()
    add(s, request("a", n=2))
    step(s, 9)
    add(s, request("b"))
    assert repr(s) == "<Scheduler waiting=1 running=2 blocks=4/64>"
    assert len(s.abort_all(1.0, RuntimeError("bye"))) == 3
    assert repr(s.waiting) == "<WaitingQueue 0>" and s.kv.num_free_blocks == 64


def test_a_stop_found_outside_ends_a_sequence_once() -> None:
    s = scheduler()
    (sequence,) = add(s, request("a"))
    step(s, 9)
    s.finish(sequence, FinishReason.STOP, 1.0)
    s.finish(sequence, FinishReason.ABORT, 2.0)
    assert (sequence.finish_reason, sequence.finish_time) == (FinishReason.STOP, 1.0)
    assert s.kv.num_free_blocks == s.kv.num_blocks


def test_slots_without_a_token_are_a_share_of_what_is_in_use() -> None:
    s = scheduler()
    assert s.residents.fragmentation == 0
    add(s, request("a", 5))
    step(s, 9)
    assert s.residents.fragmentation == 3 / 8
    s.abort_all(2.0)
    assert s.residents.fragmentation == 0


def test_choices_that_share_a_block_never_count_for_more_than_all_of_it() -> None:
    s = scheduler(policy=ContinuousPolicy(max_num_seqs=8))
    add(s, request("a", 5, n=6))
    for _ in range(2):
        step(s, 9)
        assert 0 < s.residents.fragmentation <= 1


def test_counters_tell_what_was_added() -> None:
    s = scheduler()
    before = replace(s.counters)
    s.kv.pin([])
    add(s, request("a", 9))
    step(s, 9)
    s.kv.pin(list(request("a", 9).prompt_token_ids))
    add(s, request("b", 9))
    s.abort("a", 2.0)
    step(s, 9)
    new = s.counters.since(before)
    assert (new.prefix_query_tokens, new.prefix_hit_tokens, new.pinned_hit_tokens) == (18, 8, 8)
    assert s.counters.since(s.counters) == SchedulerCounters()
