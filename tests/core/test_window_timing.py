"""The window over the scheduler in virtual time: exact to the oldest arrival, whatever comes before and between."""

from __future__ import annotations

import pytest

from microbatch.core.plan import StepResult
from microbatch.core.policies import WindowPolicy
from tests.core.factory import add, request, scheduler


def simulate(arrivals: list[float], *, batch: int, window_ms: float, call_s: float) -> list[tuple[float, list[float]]]:
    """Batches as (time of closing, arrivals in it); a call of the model takes ``call_s`` and answers with one token.

    The clock jumps to the next arrival, the scheduler's ``wake_at`` or the end of the call: nothing is slept.
    """
    s = scheduler(num_blocks=512, policy=WindowPolicy(max_batch_size=batch, window_ms=window_ms))
    coming, now, closed = sorted(arrivals), 0.0, []
    while coming or not s.idle:
        while coming and coming[0] <= now:
            add(s, request(f"r{len(coming)}", 3, coming.pop(0), max_tokens=1))
        plan = s.schedule(now)
        if plan is None:
            now = min([t for t in (s.wake_at, coming[0] if coming else None) if t is not None])
            continue
        if plan.sequences:
            batch_arrivals = [q.arrival_time for q in s.running]
            closed.append((now, batch_arrivals))
            now += call_s
        s.apply(StepResult(plan.step_id, {q.seq_id: 9 for q in plan.sequences}), now)
    return closed


def test_a_lone_request_goes_exactly_at_the_end_of_its_window() -> None:
    assert simulate([7.0], batch=8, window_ms=50, call_s=0.2) == [(7.05, [7.0])]


def test_the_window_opens_with_the_arrival_not_with_the_end_of_the_last_batch() -> None:
    """A quiet second, then one request and seven more within 40 ms: one batch of eight, closed by size."""
    burst = [2.0 + i * 0.005 for i in range(8)]
    closed = simulate([0.5, *burst], batch=8, window_ms=100, call_s=0.05)
    assert [len(b) for _, b in closed] == [1, 8]
    assert closed[1][0] == pytest.approx(burst[-1])


def test_a_steady_trickle_never_restarts_the_window() -> None:
    arrivals = [i * 0.03 for i in range(67)]
    closed = simulate(arrivals, batch=64, window_ms=100, call_s=0.05)
    waits = [t - arrival for t, batch in closed for arrival in batch]
    assert len(waits) == 67 and max(waits) <= 0.1 + 0.05 + 1e-9
    for time, batch in closed[:-1]:
        assert time == pytest.approx(min(batch) + 0.1), "the batch closes exactly with the oldest one's window"


def test_requests_that_waited_through_a_long_batch_go_at_once() -> None:
    closed = simulate([0.0, 0.1, 0.15, 0.2], batch=8, window_ms=50, call_s=1.0)
    assert closed == [(0.05, [0.0]), (pytest.approx(1.05), [0.1, 0.15, 0.2])]


@pytest.mark.parametrize(("batch", "count", "sizes"), [(4, 9, [4, 4, 1]), (1, 3, [1, 1, 1]), (256, 140, [140])])
def test_batch_sizes_never_exceed_the_limit(batch: int, count: int, sizes: list[int]) -> None:
    closed = simulate([1.0] * count, batch=batch, window_ms=50, call_s=0.01)
    assert [len(b) for _, b in closed] == sizes
