"""The continuous policy over the scheduler: joining between steps, chunks, budgets, shared prompts, shrinking."""

from __future__ import annotations

import pytest

from microbatch.core.budget import StepLimits, share_tokens
from microbatch.core.plan import StepPlan, StepResult
from microbatch.core.policies import ContinuousPolicy
from microbatch.core.request import FinishReason
from microbatch.core.scheduler import Scheduler
from microbatch.errors import OutOfMemoryError, SetupError
from tests.core.factory import add, request, scheduler


def continuous(*, seqs: int = 8, budget: int = 2048, num_blocks: int = 64, prefix_cache: bool = True) -> Scheduler:
    policy = ContinuousPolicy(max_num_seqs=seqs)
    return scheduler(policy=policy, num_blocks=num_blocks, max_num_batched_tokens=budget, prefix_cache=prefix_cache)


def step(s: Scheduler, token: int = 9, now: float = 1.0) -> StepPlan:
    plan = s.schedule(now)
    s.check_integrity()
    assert plan is not None
    s.apply(StepResult(plan.step_id, {q.seq_id: token for q in plan.sequences if q.samples}), now)
    s.check_integrity()
    return plan


def fed(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(q.seq_id, q.start, len(q.token_ids), q.samples) for q in plan.sequences]


def test_a_request_joins_what_runs_at_the_next_step() -> None:
    s = continuous()
    add(s, request("a", 5))
    assert fed(step(s)) == [(0, 0, 5, True)]
    add(s, request("b", 3, 0.5))
    assert fed(step(s)) == [(0, 5, 1, True), (1, 0, 3, True)]
    assert s.wake_at is None and repr(s.residents) == "<Residents 2>"


def test_long_prompts_are_fed_in_chunks_and_hold_up_no_decode() -> None:
    s = continuous(budget=6)
    add(s, request("a", 4))
    add(s, request("b", 9, 0.1))
    assert fed(step(s)) == [(0, 0, 4, True), (1, 0, 2, False)]
    assert fed(step(s)) == [(0, 4, 1, True), (1, 2, 5, False)]
    assert fed(step(s)) == [(0, 5, 1, True), (1, 7, 2, True)]
    assert step(s).useful_token_ratio == 1.0


def test_no_more_sequences_than_allowed() -> None:
    s = continuous(seqs=2)
    for name in "abc":
        add(s, request(name, 2, max_tokens=2))
    assert len(step(s).sequences) == 2
    step(s)
    assert [q[0] for q in fed(step(s))] == [2]


def test_the_latest_arrival_is_preempted_and_nothing_joins_in_that_step() -> None:
    s = continuous(num_blocks=5, prefix_cache=False)
    old, young = (add(s, request(name, 8, at, max_tokens=8))[0] for name, at in (("a", 0.0), ("b", 0.1)))
    add(s, request("c", 2, 0.2))
    step(s)
    plan = step(s)
    assert plan.released == (2, young.seq_id) and young.num_preemptions == 1 and not plan.admitted
    assert [q[0] for q in fed(plan)] == [old.seq_id]


def test_choices_go_on_without_a_first_one_that_has_ended() -> None:
    s = continuous(budget=4)
    sequences = add(s, request("a", 11, n=2))
    step(s)
    s.finish(sequences[0], FinishReason.STOP, 1.0)
    assert 1 in [q[0] for q in fed(step(s))]


def test_out_of_memory_shrinks_steps_and_a_long_run_without_gives_them_back() -> None:
    s = continuous(budget=64)
    for name in "abcd":
        add(s, request(name, 8, max_tokens=100))
    assert s.schedule(1.0) is not None
    assert s.fail(OutOfMemoryError("full"), 1.0) == []
    plan = step(s)
    assert len(plan.sequences) == 2 and plan.num_tokens <= 16
    for _ in range(70):
        step(s)
    assert s.num_running == 4


def test_a_single_token_that_does_not_fit_ends_its_sequence() -> None:
    s = continuous()
    add(s, request("a", 5))
    sizes = []
    while (plan := s.schedule(1.0)) is not None:
        if not plan.sequences:
            s.apply(StepResult(plan.step_id, {}), 1.0)
            continue
        sizes.append(plan.num_tokens)
        deltas = s.fail(OutOfMemoryError("full"), 1.0)
    assert sizes == [5, 2, 1] and isinstance(deltas[0].error, OutOfMemoryError) and s.idle


@pytest.mark.parametrize(
    ("remaining", "budget", "counts"),
    [
        ([], 5, []),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([9, 1, 4], 8, [7, 1, 0]),
        ([3, 1, 4], 8, [3, 1, 4]),
        ([10], 4, [4]),
    ],
)
def test_sharing_of_tokens(remaining: list[int], budget: int, counts: list[int]) -> None:
    assert share_tokens(remaining, budget) == counts


def test_limits_come_back_in_doublings() -> None:
    limits = StepLimits(100)
    limits.note_success()
    assert limits.room(7) is None
    limits.shrink(8, 60)
    assert (limits.num_rows, limits.num_tokens, limits.room(5), limits.room(3)) == (4, 30, 0, 1)
    for _ in range(64 * 2):
        limits.note_success()
    assert limits.num_tokens == 100 and limits.num_rows == 16
    for _ in range(64 * 6):
        limits.note_success()
    assert limits.num_rows is None and limits.room(1000) is None


def test_a_policy_of_no_sequences_is_refused() -> None:
    with pytest.raises(SetupError, match="max_num_seqs must be a whole number"):
        ContinuousPolicy(max_num_seqs=0)
    assert ContinuousPolicy(3).parameters() == {"max_num_seqs": 3}


def test_a_prompt_to_pin_that_comes_in_chunks_is_pinned_when_it_is_whole() -> None:
    s = continuous(budget=3)
    s.add(request("a", 9, max_tokens=1), seed=0, max_total_tokens=10, pin_prompt=True)
    step(s)
    assert s.kv.max_num_tokens() == 64 * 4
    step(s)
    step(s)
    assert s.idle is False and s.kv.max_num_tokens() == 62 * 4, "two full blocks are kept"


def test_seats_are_free_for_those_who_can_join_at_the_next_step() -> None:
    s = scheduler(policy=ContinuousPolicy(max_num_seqs=2))
    assert s.num_free_seats == 2
    add(s, request("a", 5))
    step(s)
    assert s.num_free_seats == 1
    assert scheduler().num_free_seats == 0  # nothing joins a batch that runs
