"""``best_of``: the likeliest of several answers (case B58)."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.api.openai.best_of import keep_best
from microbatch.core.plan import TokenLogprobs
from microbatch.core.request import FinishReason
from microbatch.engine.outputs import Choice, RequestOutput, Timings, Usage
from tests.api.fake_engine import FakeEngine
from tests.api.support import COMPLETIONS, post

pytestmark = pytest.mark.anyio


def output(*logprobs: list[float]) -> RequestOutput:
    choices = tuple(
        Choice(i, str(i), tuple(range(len(row))), FinishReason.STOP, tuple(TokenLogprobs(x) for x in row))
        for i, row in enumerate(logprobs)
    )
    return RequestOutput("r", choices, Usage(3, 40, 0), Timings(None, None, None))


def test_the_highest_mean_wins_not_the_highest_sum() -> None:
    kept = keep_best(output([-0.9], [-0.5, -0.5, -0.5, -0.5], [], [-0.1, -3.0], [-0.5]), 3)
    assert [(c.index, c.text) for c in kept.choices] == [(0, "1"), (1, "4"), (2, "0")]
    assert kept.usage == Usage(3, 40, 0)
    assert keep_best(output([-1.0], [-0.5]), 2) == output([-1.0], [-0.5]), "all are wanted: order as they came"


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}])
async def test_all_are_made_and_counted_and_some_are_given(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    answer = (await post(engine, COMPLETIONS, prompt=["A", "B"], n=2, best_of=5, **fields)).json()
    assert [request.params.n for request in engine.requests] == [5, 5]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 5
    assert all(bool(choice["logprobs"]) == bool(fields) for choice in answer["choices"])


async def test_echo_with_logprobs_and_best_of() -> None:
    answer = (await post(FakeEngine(), COMPLETIONS, echo=True, logprobs=1, best_of=3, max_tokens=1)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "HiH" and choice["logprobs"]["token_logprobs"][0] is None


async def test_as_many_as_asked_for_may_be_streamed() -> None:
    engine = FakeEngine()
    assert (await post(engine, COMPLETIONS, n=2, best_of=2, stream=True)).status_code == 200
    assert engine.requests[0].params.logprobs is None
