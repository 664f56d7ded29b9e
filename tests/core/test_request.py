"""Sampling parameters: every bound at its edge, and the values around them."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.core.plan import StepPlan
from microbatch.core.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
)
from microbatch.core.sequence import Sequence
from microbatch.errors import InvalidRequestError
from tests.core.factory import request

WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", True),
    ("temperature", "1"),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", float("inf")),
    ("seed", 2**64),
    ("seed", 1.0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("top_k", -2),
    ("n", 0),
    ("n", MAX_N + 1),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("stop", [""]),
    ("stop", ["x"] * (MAX_STOPS + 1)),
    ("stop", "x" * (MAX_STOP_CHARS + 1)),
    ("stop", [1]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", range(MAX_LOGIT_BIAS + 1)),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
]

RIGHT: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 2),
    ("top_p", 0),
    ("top_p", 1),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 100),
    ("seed", -(2**63)),
    ("seed", 2**64 - 1),
    ("max_tokens", 1),
    ("top_k", -1),
    ("n", MAX_N),
    ("logprobs", 0),
    ("logprobs", MAX_LOGPROBS),
    ("stop", ("x" * MAX_STOP_CHARS,) * MAX_STOPS),
    ("stop_token_ids", tuple(range(MAX_LOGIT_BIAS))),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), -100.0)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda part: repr(part)[:30])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(("name", "value"), RIGHT, ids=lambda part: repr(part)[:30])
def test_the_last_value_inside_a_bound_is_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_goes_up_to_max_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    with pytest.raises(InvalidRequestError, match="min_tokens must be from 0 to 3, got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_one_stop_text_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_parameters_keep_their_own_copy_of_what_they_were_given() -> None:
    bias, stops = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)  # type: ignore[arg-type]
    bias[2], stops[0] = 1.0, "b"
    assert (params.logit_bias, params.stop) == ({1: 1.0}, ("a",))


@pytest.mark.parametrize(("params", "greedy"), [({"temperature": 0}, True), ({"top_k": 1}, True), ({}, False)])
def test_greedy(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).greedy is greedy


def test_a_plan_without_rows_wastes_nothing() -> None:
    assert StepPlan(1, ()).useful_token_ratio == 1.0
    assert StepPlan(1, ()).num_tokens == 0


def test_a_sequence_says_how_far_it_has_come() -> None:
    sequence = Sequence(3, request("a", 5), 0, seed=1, max_total_tokens=9)
    sequence.append(7)
    assert repr(sequence) == "<Sequence 3 waiting prompt=5 output=1 computed=0>"
    assert (sequence.num_tokens, sequence.token_ids[-1], sequence.arrival_time) == (6, 7, 0.0)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
def test_null_is_empty_and_a_number_is_refused_by_name(name: str) -> None:
    empty: dict[str, Any] = {name: None}
    number: dict[str, Any] = {name: 5}
    assert not getattr(SamplingParams(**empty), name)
    with pytest.raises(InvalidRequestError, match=f"{name} must not be int"):
        SamplingParams(**number)
