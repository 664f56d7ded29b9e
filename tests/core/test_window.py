"""The window policy: closed by size or by the age of the oldest arrival, exact, never restarted."""

from __future__ import annotations

import pytest

from microbatch.core.policies import SerialPolicy, WindowPolicy, make_policy
from microbatch.core.policy import Decision, SchedulerView, WaitingView
from microbatch.errors import SetupError


def view(*arrivals: float, running: int = 0, draining: bool = False) -> SchedulerView:
    waiting = tuple(WaitingView(i, arrival, 10) for i, arrival in enumerate(arrivals))
    return SchedulerView(waiting, running, draining)


def test_closes_by_window_exactly_at_the_oldest_arrivals_end() -> None:
    policy = WindowPolicy(max_batch_size=8, window_ms=50)
    assert policy.decide(view(10.0), 10.0) == Decision(wake_at=10.05)
    assert policy.decide(view(10.0), 10.0499) == Decision(wake_at=10.05)
    assert policy.decide(view(10.0), 10.05) == Decision(admit=(0,), reason="window")


def test_later_arrivals_never_restart_the_window() -> None:
    policy = WindowPolicy(max_batch_size=64, window_ms=100)
    arrivals: list[float] = []
    for k in range(4):
        arrivals.append(k * 0.03)
        assert policy.decide(view(*arrivals), arrivals[-1]) == Decision(wake_at=0.1)
    assert policy.decide(view(*arrivals), 0.1).admit == (0, 1, 2, 3)


def test_a_full_batch_closes_at_once_and_never_holds_one_more() -> None:
    policy = WindowPolicy(max_batch_size=4, window_ms=50)
    assert policy.decide(view(*[1.0] * 9), 1.0) == Decision(admit=(0, 1, 2, 3), reason="size")
    assert policy.decide(view(*[1.0] * 3), 1.0).admit == ()


def test_one_sequence_is_a_full_batch_of_one() -> None:
    assert WindowPolicy(max_batch_size=1).decide(view(1.0, 1.0), 1.0) == Decision(admit=(0,), reason="size")


def test_a_running_batch_is_left_alone_and_the_wait_counts() -> None:
    policy = WindowPolicy(max_batch_size=8, window_ms=50)
    assert policy.decide(view(1.0, running=2), 9.0) == Decision()
    assert policy.decide(view(1.0), 9.0) == Decision(admit=(0,), reason="window")


def test_draining_does_not_wait_for_company() -> None:
    assert WindowPolicy().decide(view(1.0, draining=True), 1.0) == Decision(admit=(0,), reason="drain")


def test_an_urgent_sequence_does_not_wait_for_company() -> None:
    waiting = (WaitingView(0, 1.0, 10), WaitingView(1, 1.01, 10, urgent=True))
    assert WindowPolicy().decide(SchedulerView(waiting, 0), 1.02) == Decision(admit=(0, 1), reason="idle")
    assert WindowPolicy().decide(SchedulerView(waiting, 1), 1.02) == Decision()


def test_a_window_of_zero_goes_at_once() -> None:
    assert WindowPolicy(window_ms=0).decide(view(1.0), 1.0).reason == "window"


def test_nothing_waits_nothing_to_decide() -> None:
    assert WindowPolicy().decide(view(), 1.0) == Decision()
    assert SerialPolicy().decide(view(), 1.0) == Decision()


def test_serial_takes_the_oldest_alone() -> None:
    policy = SerialPolicy()
    assert policy.decide(view(1.0, 2.0), 2.0) == Decision(admit=(0,), reason="idle")
    assert policy.decide(view(1.0, running=1), 2.0) == Decision()
    assert policy.parameters() == {}


def test_policies_by_name() -> None:
    policy = make_policy("window", {"max_batch_size": 3, "window_ms": 7})
    assert policy.parameters() == {"max_batch_size": 3, "window_ms": 7}
    with pytest.raises(SetupError, match="known: continuous, serial, window"):
        make_policy("windows", {})
    with pytest.raises(SetupError, match="policy 'serial'"):
        make_policy("serial", {"window_ms": 5})


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_batch_size": 0},
        {"max_batch_size": 2.5},
        {"max_batch_size": "4"},
        {"window_ms": -1},
        {"window_ms": 1e9},
        {"window_ms": "x"},
    ],
)
def test_wrong_parameters_are_one_clear_line(arguments: dict[str, float]) -> None:
    with pytest.raises(SetupError, match="must be"):
        make_policy("window", arguments)
