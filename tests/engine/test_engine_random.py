"""A thousand random arrivals, aborts, time-outs and faults: every request ends once, every block is free."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from microbatch.core.plan import StepPlan
from microbatch.core.request import SamplingParams
from microbatch.engine.client import AsyncEngine
from microbatch.engine.stream import RequestStream
from microbatch.errors import MicrobatchError, OutOfMemoryError, QueueFullError
from microbatch.executor.fake import FakeExecutor
from tests.engine.factory import make_engine
from tests.engine.test_engine import Notes, all_free

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("policy", "tokens"), [("window", 24), ("serial", 6), ("continuous", 24)])
async def test_random_requests_end_once_each(policy: str, tokens: int) -> None:
    count = 1000
    rnd = random.Random(7)
    calm: list[bool] = []
    solo = await answers_alone(tokens)

    def fault(plan: StepPlan) -> BaseException | None:
        kind = 1.0 if calm else rnd.random()
        return RuntimeError("boom") if kind < 0.005 else OutOfMemoryError("full") if kind < 0.01 else None

    def row_errors(plan: StepPlan) -> dict[int, str]:
        return {plan.sequences[0].seq_id: "NaN"} if plan.sequences and not calm and rnd.random() < 0.003 else {}

    notes = Notes()
    executor = FakeExecutor(fault=fault, row_errors=row_errors)
    arguments: dict[str, dict[str, Any]] = {
        "window": {"max_batch_size": 6, "window_ms": 0.5},
        "continuous": {"max_num_seqs": 8},
    }
    engine = make_engine(executor, num_blocks=12, policy=policy, policy_args=arguments.get(policy), max_queue=30)
    engine.add_observer(notes)
    ends: dict[str, int] = {}
    async with engine:
        places = asyncio.Semaphore(40)
        await asyncio.gather(*[one(engine, random.Random(i), i, solo, ends, places, tokens) for i in range(count)])
        calm.append(True)
        await engine.generate("x" * 150, SamplingParams(max_tokens=20, ignore_eos=True))
        assert all_free(engine) and engine.status.state == "ready"
    assert ends.pop("refused") > 0 and sum(ends.values()) == count, ends
    assert ends["answered"] > count / 4 and ends["aborted"] > count / 20 and ends["error"] > count / 100, ends
    assert len(notes.records) == count + 1 and (notes.preemptions > 0 or policy == "serial")


async def answers_alone(tokens: int) -> dict[int, tuple[int, ...]]:
    async with make_engine(policy="serial") as engine:
        outs = [await engine.generate(prompt(i), SamplingParams(max_tokens=tokens)) for i in range(10)]
    return {i: out.token_ids for i, out in enumerate(outs)}


def prompt(i: int) -> str:
    """Ten prompts; they share a beginning of 16 letters or more."""
    return "the shared beginning of all requests"[: 20 + i] + str(i)


async def accepted(
    engine: AsyncEngine, i: int, deadline: float | None, ends: dict[str, int], tokens: int
) -> RequestStream:
    """Ask again while the queue is full, as clients do."""
    params = SamplingParams(max_tokens=tokens)
    while True:
        try:
            return engine.submit(list(prompt(i % 10).encode()), params, deadline_s=deadline)
        except QueueFullError:
            ends["refused"] = ends.get("refused", 0) + 1
            await asyncio.sleep(0.001)


async def one(
    engine: AsyncEngine,
    rnd: random.Random,
    i: int,
    solo: dict[int, tuple[int, ...]],
    ends: dict[str, int],
    places: asyncio.Semaphore,
    tokens: int,
) -> None:
    """One client: patient, hasty or leaving in the middle. Its answer, if it gets one, is that of a run alone."""
    outcome = "lost"
    async with places:
        try:
            deadline = rnd.choice([None, None, None, None, 0.001, 0.02])
            stream = await accepted(engine, i, deadline, ends, tokens)
            outcome = "error"
            async with stream:
                if rnd.random() < 0.2:
                    for _ in range(rnd.randrange(30)):
                        await asyncio.sleep(0)
                    outcome = "aborted"
                else:
                    out = await stream.collect()
                    assert out.token_ids == solo[i % 10]
                    outcome = "answered"
        except MicrobatchError:
            pass
    ends[outcome] = ends.get(outcome, 0) + 1
