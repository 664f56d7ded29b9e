"""The owner of the engine's state, step by step: what is told when, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.core.plan import StepPlan
from microbatch.core.policies import make_policy
from microbatch.core.request import FinishReason, Request, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.engine.engine import EngineCore
from microbatch.engine.stream import RequestStream
from microbatch.errors import EngineDeadError
from microbatch.executor.fake import FakeExecutor
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch_kernels.manager import PagedKVManager
from tests.engine.factory import script
from tests.engine.test_engine import Notes

pytestmark = pytest.mark.anyio


class Steps:
    """A core and a scripted executor; time is the number of the step."""

    def __init__(self, text: str) -> None:
        self.notes = Notes()
        tokenizer = ByteTokenizer()
        scheduler = Scheduler(
            PagedKVManager(64, 16), make_policy("continuous", {}), eos_token_ids=tokenizer.eos_token_ids
        )
        self.core = EngineCore(scheduler)
        self.core.observers.add(self.notes)
        self._executor = FakeExecutor(script(text))
        self._now = 0.0

    def add(self, request_id: str, **fields: Any) -> RequestStream:
        params = SamplingParams(**{"temperature": 0, "max_tokens": 9, **fields})
        request = Request(request_id, tuple(b">"), params, arrival_time=0.0)
        detokenizers = [ByteTokenizer().detokenizer(params.stop) for _ in range(params.n)]
        stream = RequestStream(request, detokenizers, lambda _: None, lambda: self._now)
        self.core.request_ids.add(request_id)
        self.core.add(request, stream, seed=1, max_total_tokens=1 + (params.max_tokens or 9))
        return stream

    def step(self) -> StepPlan:
        plan = self.core.begin_step(self._now)
        assert plan is not None
        self._now += 1
        self.core.end_step(plan, self._executor.execute(plan), self._now)
        return plan


async def read(stream: RequestStream) -> tuple[str, FinishReason]:
    out = await stream.collect()
    return out.text, out.finish_reason


async def test_nothing_is_told_before_it_is_delivered() -> None:
    steps = Steps("abc")
    stream = steps.add("one")
    assert not steps.core.has_news and not steps.core.deliver()
    steps.step()
    steps.step()
    assert steps.core.has_news and "unread=0" in repr(stream)
    assert steps.core.deliver() and "unread=1" in repr(stream)
    assert steps.notes.gaps == 1
    for _ in range(2):
        steps.step()
        steps.core.deliver()
    assert await read(stream) == ("abc", FinishReason.STOP)
    assert [r.completion_tokens for r in steps.notes.records] == [4]


async def test_a_stop_text_is_found_before_the_next_plan_is_made() -> None:
    steps = Steps("abcdef")
    stopping, going = steps.add("stopping", stop=("c",)), steps.add("going")
    sizes = [len(steps.step().sequences) for _ in range(5)]
    assert sizes == [2, 2, 2, 1, 1]
    assert stopping.finished and not going.finished
    assert await read(stopping) == ("ab", FinishReason.STOP)
    assert stopping.usage().completion_tokens == 3
    assert steps.core.has_news, "the reader is woken by the next delivery"


async def test_news_of_a_sequence_stay_in_order_when_it_is_aborted_before_delivery() -> None:
    steps = Steps("abcdef")
    plain, watched = steps.add("plain", n=2), steps.add("watched", stop=("x",))
    steps.step()
    steps.step()
    for request_id in ("plain", "watched", "unknown"):
        steps.core.abort(request_id, 9.0)
    steps.core.deliver()
    out = await plain.collect()
    assert [(c.text, c.finish_reason) for c in out.choices] == [("ab", FinishReason.ABORT)] * 2
    assert await read(watched) == ("ab", FinishReason.ABORT)
    assert sorted(r.finish_reason for r in steps.notes.records) == ["abort", "abort"]
    assert not steps.core.request_ids
    steps.core.scheduler.check_integrity()


async def test_an_answer_that_was_ready_is_not_lost_with_the_engine() -> None:
    steps = Steps("ab")
    ready, running = steps.add("ready", max_tokens=2), steps.add("running")
    steps.step()
    steps.step()
    steps.core.fail_all(EngineDeadError("dead"))
    assert await read(ready) == ("ab", FinishReason.LENGTH)
    with pytest.raises(EngineDeadError):
        await running.collect()


async def test_a_delivery_that_fails_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps("abcdef")
    streams = [steps.add("one", max_tokens=1), steps.add("two"), steps.add("three")]
    steps.step()

    def broken(record: object) -> None:
        raise AssertionError("an observer that raises")

    monkeypatch.setattr(steps.notes, "request_finished", broken)
    with pytest.raises(AssertionError):
        steps.core.deliver()
    steps.core.fail_all(EngineDeadError("dead"))
    assert await read(streams[0]) == ("a", FinishReason.LENGTH)
    for stream in streams[1:]:
        with pytest.raises(EngineDeadError):
            await stream.collect()
