"""So much a minute, with the time passed in."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from microbatch.api.token_bucket import TokenBucket


def test_a_minutes_worth_at_once_then_as_it_flows_in() -> None:
    bucket = TokenBucket(60, now=5.0)
    assert bucket.wait(60, 5.0) == 0
    bucket.take(60)
    assert bucket.wait(1, 5.0) == pytest.approx(1)
    assert bucket.wait(1, 5.5) == pytest.approx(0.5)
    assert bucket.wait(1, 6.0) == 0 and not bucket.is_full(64.0) and bucket.is_full(65.0)


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = TokenBucket(60, now=0.0)
    assert bucket.wait(100, 0.0) == 0
    bucket.take(100)
    assert bucket.wait(1, 0.0) == pytest.approx(41)


def test_what_comes_back_can_be_taken_again_but_never_more_than_fits() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(50)
    bucket.give_back(500)
    assert bucket.wait(60, 0.0) == 0
    bucket.take(60)
    assert bucket.wait(1, 0.0) > 0


def test_a_rate_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TokenBucket(0, 0.0)


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=60))
def test_nobody_gets_more_than_the_rate_and_the_first_minute(rate: int, asks: list[tuple[float, int]]) -> None:
    """Over any time, what was taken is at most the rate times the time, and one minute's worth at the start (and what
    one amount over the capacity may overdraw)."""
    now, taken, largest = 0.0, 0, 0
    bucket = TokenBucket(rate, now)
    for gap, amount in asks:
        now += gap
        if bucket.wait(amount, now) == 0:
            bucket.take(amount)
            taken, largest = taken + amount, max(largest, amount)
    assert taken <= rate * now / 60 + rate + largest + 1e-6
