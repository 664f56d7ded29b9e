"""The engine over a fake executor: answers, streams, refusals, aborts, faults, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from anyio import to_thread

from microbatch.core.plan import StepPlan
from microbatch.core.request import FinishReason, SamplingParams
from microbatch.engine.bell import Bell
from microbatch.engine.client import AsyncEngine
from microbatch.engine.stats import Observer, RequestRecord
from microbatch.errors import (
    ContextLengthError,
    DeadlineError,
    DrainingError,
    EngineDeadError,
    ExecutionError,
    InvalidRequestError,
    OutOfMemoryError,
    QueueDeadlineError,
    QueueFullError,
    UnavailableError,
)
from microbatch.executor.fake import FakeExecutor, constant
from tests.engine.factory import Gate, make_engine, script

pytestmark = pytest.mark.anyio
GREEDY = SamplingParams(temperature=0, max_tokens=40)


class Notes(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, int]] = []
        self.records: list[RequestRecord] = []
        self.rejected: list[str] = []
        self.generated = 0
        self.prompt = 0
        self.gaps = 0
        self.preemptions = 0
        self.counted: list[tuple[int, ...]] = []

    def batch_closed(self, reason: str, size: int) -> None:
        self.closed.append((reason, size))

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def request_rejected(self, reason: str) -> None:
        self.rejected.append(reason)

    def step_done(self, prompt_tokens: int, generation_tokens: int, useful_token_ratio: float) -> None:
        self.generated += generation_tokens
        self.prompt += prompt_tokens

    def token_gaps(self, seconds: float, count: int) -> None:
        self.gaps += count

    def preempted(self, count: int) -> None:
        self.preemptions += count

    def prefix_lookup(self, query_tokens: int, hit_tokens: int, pinned_tokens: int) -> None:
        self.counted.append((query_tokens, hit_tokens, pinned_tokens))

    def prompt_forked(self, tokens: int) -> None:
        self.counted.append((tokens,))


def all_free(engine: AsyncEngine) -> bool:
    engine.parts.loop.core.scheduler.check_integrity()
    numbers = engine.statistics()
    return numbers.num_free_blocks == numbers.num_blocks and not numbers.num_running and not numbers.num_waiting


async def pieces(stream: AsyncIterator[object]) -> list[object]:
    return [delta async for delta in stream]


async def test_an_answer_and_its_numbers() -> None:
    notes = Notes()
    engine = make_engine(FakeExecutor(script("Hello, wörld")))
    engine.add_observer(notes)
    async with engine:
        out = await engine.generate("say>", GREEDY)
    assert out.text == "Hello, wörld" and out.finish_reason is FinishReason.STOP
    assert out.usage.prompt_tokens == 4 and out.usage.completion_tokens == 14 and out.usage.cached_tokens == 0
    assert out.token_ids == tuple("Hello, wörld".encode())
    assert out.timings.queue is not None and out.timings.ttft is not None and out.timings.e2e is not None
    assert 0 <= out.timings.queue <= out.timings.ttft <= out.timings.e2e
    assert notes.closed == [("window", 1)] and notes.generated == 14
    (record,) = notes.records
    assert record.finish_reason == "stop" and record.tpot_s is not None and notes.gaps == 12


async def test_what_was_looked_up_and_shared_is_told_once() -> None:
    notes = Notes()
    engine = make_engine(FakeExecutor(script("abc")), policy="continuous")
    engine.add_observer(notes)
    async with engine:
        for n in (1, 2):
            await engine.generate("x" * 39 + ">", replace(GREEDY, n=n))
    lookups = [c for c in notes.counted if len(c) == 3]
    assert sum(c[0] for c in lookups) == 80 and sum(c[1] for c in lookups) == 32 and not any(c[2] for c in lookups)
    assert [c for c in notes.counted if len(c) == 1] == [(39,)]


async def test_streams_join_to_the_answer() -> None:
    async with make_engine(FakeExecutor(script("a stream of text"))) as engine:
        deltas = [d async for d in engine.stream("say>", GREEDY)]
    assert "".join(d.text for d in deltas) == "a stream of text"
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.STOP] == [deltas[-1].finish_reason]


@pytest.mark.parametrize("policy", ["window", "continuous"])
@pytest.mark.parametrize("stop", [(), ("z",)])
async def test_a_token_is_told_while_the_next_step_runs(policy: str, stop: tuple[str, ...]) -> None:
    gate = Gate()
    executor = FakeExecutor(script("abc"), latency=lambda plan: gate.latency(plan) if plan.step_id else 0.0)
    params = SamplingParams(temperature=0, max_tokens=3, stop=stop)
    async with make_engine(executor, policy=policy) as engine:
        stream = engine.stream("say>", params)
        first = await anext(stream)
        await to_thread.run_sync(gate.entered.acquire)
        assert first.text == "a" and len(executor.plans) == 2
        gate.open()
        assert "".join([delta.text async for delta in stream]) == "bc"


async def test_a_whole_answer_wakes_its_reader_once() -> None:
    async with make_engine(FakeExecutor(script("abcdefgh"))) as engine:
        stream = engine.submit(list(b"say>"), GREEDY)
        wakes: list[bool] = []

        class CountedBell(Bell):
            async def wait(self) -> None:
                await super().wait()
                wakes.append(stream.finished)

        stream.listen(CountedBell(), 9, pytest.fail)
        assert (await stream.collect()).text == "abcdefgh" and wakes == [True]


async def test_requests_of_one_moment_share_a_batch() -> None:
    notes = Notes()
    engine = make_engine(policy_args={"max_batch_size": 4, "window_ms": 10_000})
    engine.add_observer(notes)
    async with engine:
        await asyncio.gather(*[engine.generate(f"{i}", SamplingParams(max_tokens=3)) for i in range(8)])
    assert notes.closed == [("size", 4), ("size", 4)]


async def test_a_stop_text_ends_the_sequence_and_frees_its_blocks() -> None:
    executor = FakeExecutor(script("one two three four five"))
    async with make_engine(executor) as engine:
        out = await engine.generate("say>", SamplingParams(max_tokens=90, stop=("three", "o th")))
        assert out.text == "one tw" and out.finish_reason is FinishReason.STOP
        assert out.usage.completion_tokens < 14
        assert all_free(engine)


async def test_n_choices_have_their_own_index_and_one_prompt() -> None:
    async with make_engine() as engine:
        out = await engine.generate("abc", SamplingParams(max_tokens=5, n=3, logprobs=1))
        assert [c.index for c in out.choices] == [0, 1, 2]
        assert out.usage.prompt_tokens == 3
        assert all(c.logprobs is not None and len(c.logprobs) == len(c.token_ids) for c in out.choices)
        assert all_free(engine)


async def test_messages_use_the_declared_system_prompt_unless_they_bring_one() -> None:
    executor = FakeExecutor(constant(65))
    async with make_engine(executor, system_prompt="be as brief as you can") as engine:
        held = engine.statistics()
        assert held.num_blocks - held.num_free_blocks == 2
        plain: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
        own: list[dict[str, object]] = [{"role": "system", "content": "be long"}, *plain]
        spelled: list[dict[str, object]] = [{"role": "system", "content": "be as brief as you can"}, *plain]
        assert await engine.encode_chat(plain) == await engine.encode_chat(spelled)
        assert b"brief" not in bytes(await engine.encode_chat(own))
        out = await engine.generate(messages=plain, params=SamplingParams(max_tokens=2))
        assert out.usage.cached_tokens == 32 and out.text == "AA"


async def test_refusals_at_the_door() -> None:
    notes = Notes()
    engine = make_engine()
    engine.add_observer(notes)
    with pytest.raises(UnavailableError, match="being loaded"):
        engine.submit([1])
    async with engine:
        with pytest.raises(ContextLengthError, match="256 tokens") as error:
            await engine.generate("x" * 256)
        assert "the prompt has 256 tokens" in str(error.value)
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await engine.generate("")
        with pytest.raises(InvalidRequestError, match="token id 258 in prompt"):
            engine.submit([1, 258])
        with pytest.raises(InvalidRequestError, match="token id -1 in prompt"):
            engine.submit([-1])
        with pytest.raises(InvalidRequestError, match="in logit_bias"):
            engine.submit([1], SamplingParams(logit_bias={999: 1}))
        with pytest.raises(InvalidRequestError, match="either a prompt or messages"):
            await engine.generate()
        assert notes.rejected == ["context_length"] and all_free(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit([1])


async def test_the_context_end_is_length() -> None:
    async with make_engine(max_model_len=32) as engine:
        out = await engine.generate("x" * 30, SamplingParams(max_tokens=10**12, ignore_eos=True))
        assert out.finish_reason is FinishReason.LENGTH and out.usage.completion_tokens == 2


async def test_the_context_is_what_the_store_holds() -> None:
    async with make_engine(num_blocks=4) as engine:
        assert engine.max_model_len == 64
        out = await engine.generate("x" * 50, SamplingParams(ignore_eos=True))
        assert out.usage.completion_tokens == 14 and out.finish_reason is FinishReason.LENGTH


async def test_a_full_queue_is_refused_at_once_and_nothing_is_lost() -> None:
    gate = Gate()
    engine = make_engine(FakeExecutor(latency=gate.latency), max_queue=3, policy="serial")
    async with engine:
        first = engine.submit([65], GREEDY)
        await to_thread.run_sync(gate.entered.acquire)
        streams = [engine.submit([65 + i], GREEDY) for i in range(3)]
        with pytest.raises(QueueFullError) as error:
            engine.submit([70], GREEDY)
        assert error.value.status == 429 and error.value.retry_after == 1
        with pytest.raises(InvalidRequestError, match="n is at most 3"):
            engine.submit([70], SamplingParams(n=4))
        gate.open()
        for stream in (first, *streams):
            assert (await stream.collect()).finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert all_free(engine)


async def test_an_abort_while_the_step_runs_keeps_the_neighbour() -> None:
    gate = Gate()
    async with make_engine(FakeExecutor(latency=gate.latency), policy_args={"max_batch_size": 2}) as engine:
        leaving, staying = engine.submit([65], GREEDY), engine.submit([66], GREEDY)
        await to_thread.run_sync(gate.entered.acquire)
        leaving.abort()
        leaving.abort()
        gate.open()
        assert (await leaving.collect()).finish_reason is FinishReason.ABORT
        answer = await staying.collect()
        leaving.abort()
        async with make_engine() as other:
            assert answer.token_ids == (await other.generate([66], GREEDY)).token_ids
        assert all_free(engine)


async def test_cancelling_the_waiting_task_aborts_the_request() -> None:
    gate = Gate()
    notes = Notes()
    engine = make_engine(FakeExecutor(latency=gate.latency))
    engine.add_observer(notes)
    async with engine:
        task = asyncio.create_task(engine.generate("abc", GREEDY))
        await to_thread.run_sync(gate.entered.acquire)
        task.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.generate("after", SamplingParams(max_tokens=1))
        assert [r.finish_reason for r in notes.records] == ["abort", "length"] and all_free(engine)


async def test_a_queued_request_whose_client_left_is_never_computed() -> None:
    gate = Gate()
    executor = FakeExecutor(latency=gate.latency)
    async with make_engine(executor, policy="serial") as engine:
        first = engine.submit([65], GREEDY)
        await to_thread.run_sync(gate.entered.acquire)
        left = engine.submit([66, 67], GREEDY)
        async with left:
            pass
        third = engine.submit([68], GREEDY)
        gate.open()
        await first.collect()
        await third.collect()
        assert (await left.collect()).finish_reason is FinishReason.ABORT
    assert {s.seq_id for plan in executor.plans for s in plan.sequences} == {0, 2}


async def test_a_fault_of_the_model_is_an_error_for_its_batch_alone() -> None:
    calls: list[int] = []

    def fault(plan: StepPlan) -> Exception | None:
        calls.append(len(plan.sequences))
        return RuntimeError("boom") if len(calls) == 3 else None

    async with make_engine(FakeExecutor(fault=fault), policy_args={"max_batch_size": 2}) as engine:
        results = await asyncio.gather(
            *[engine.generate(t, SamplingParams(max_tokens=9, ignore_eos=True)) for t in "ab"], return_exceptions=True
        )
        assert [type(r) for r in results] == [ExecutionError] * 2 and "boom" in str(results[0])
        assert (await engine.generate("c", SamplingParams(max_tokens=2))).text
        assert all_free(engine) and engine.status.state == "ready"


async def test_a_fault_in_mid_stream_is_raised_after_the_text_before_it() -> None:
    fault = iter([None, None, None, RuntimeError("boom")])
    async with make_engine(FakeExecutor(script("abcdef"), fault=lambda plan: next(fault))) as engine:
        text = ""
        with pytest.raises(ExecutionError):
            async for delta in engine.stream("say>", GREEDY):
                text += delta.text
        assert text == "abc" and all_free(engine)


async def test_a_bad_row_fails_alone() -> None:
    executor = FakeExecutor(row_errors=lambda plan: {0: "NaN"} if any(s.seq_id == 0 for s in plan.sequences) else {})
    async with make_engine(executor, policy_args={"max_batch_size": 2}) as engine:
        bad, good = await asyncio.gather(*[engine.generate(t, GREEDY) for t in "ab"], return_exceptions=True)
        assert isinstance(bad, ExecutionError) and not isinstance(good, BaseException) and all_free(engine)


async def test_a_detokenizer_that_raises_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    engine = make_engine(policy_args={"max_batch_size": 3})
    engine.add_observer(notes)
    async with engine:
        both = SamplingParams(temperature=0, max_tokens=40, n=2)
        bad, good = engine.submit([65], both), engine.submit([66], GREEDY)

        def broken(token_id: int) -> str:
            raise ValueError("no text")

        monkeypatch.setattr(bad._detokenizers[0], "push", broken)
        with pytest.raises(ExecutionError, match="no text"):
            await bad.collect()
        assert (await good.collect()).text and all_free(engine)
        assert sorted(r.finish_reason for r in notes.records) == ["error", "length"]


async def test_out_of_memory_shrinks_the_batch_and_loses_nothing() -> None:
    fault = lambda plan: OutOfMemoryError("full") if len(plan.sequences) > 1 else None  # noqa: E731
    notes = Notes()
    engine = make_engine(FakeExecutor(fault=fault))
    engine.add_observer(notes)
    async with engine:
        results = await asyncio.gather(*[engine.generate(f"{i}", GREEDY) for i in range(4)])
        assert len(results) == 4 and notes.preemptions and all_free(engine)


async def test_deadlines_end_requests() -> None:
    gate = Gate()
    engine = make_engine(FakeExecutor(latency=gate.latency), policy="serial", queue_timeout_s=0.01)
    async with engine:
        running = engine.submit([65], GREEDY, deadline_s=0.02)
        await to_thread.run_sync(gate.entered.acquire)
        waiting = engine.submit([66], GREEDY)
        await asyncio.sleep(0.03)
        gate.open()
        with pytest.raises(QueueDeadlineError):
            await waiting.collect()
        with pytest.raises(DeadlineError):
            await running.collect()
        assert all_free(engine)


async def test_a_dead_engine_ends_everything_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    async with engine:
        core = engine.parts.loop.core

        def broken(result: object, now: float) -> None:
            raise AssertionError("the books do not balance")

        monkeypatch.setattr(core.scheduler, "apply", broken)
        stream = engine.submit([65], GREEDY)
        with pytest.raises(EngineDeadError, match="do not balance"):
            await stream.collect()
        assert engine.status.state == "dead" and "do not balance" in engine.status.reason
        with pytest.raises(EngineDeadError):
            engine.submit([65], GREEDY)


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    gate = Gate()
    engine = make_engine(FakeExecutor(latency=gate.latency))
    async with engine:
        running = engine.submit([65], GREEDY)
        await to_thread.run_sync(gate.entered.acquire)
        queued = engine.submit([66], GREEDY)
        drain = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            engine.submit([67], GREEDY)
        assert engine.status.state == "draining"
        gate.open()
        await drain
        assert (await running.collect()).text and (await queued.collect()).text and all_free(engine)


async def test_drain_gives_up_after_its_time_with_an_error() -> None:
    gate = Gate()
    engine = make_engine(FakeExecutor(latency=gate.latency))
    async with engine:
        running = engine.submit([65], GREEDY)
        await to_thread.run_sync(gate.entered.acquire)
        await engine.drain(0.01)
        with pytest.raises(DrainingError, match="before the request was done"):
            await running.collect()
        gate.open()
    assert engine.status.state == "closed"


async def test_close_ends_what_runs_and_is_idempotent() -> None:
    executor = FakeExecutor(constant(65))
    engine = make_engine(executor)
    await engine.start()
    stream = engine.submit([65], SamplingParams(max_tokens=200))
    await engine.close()
    await engine.close()
    with pytest.raises(DrainingError):
        await stream.collect()
    assert executor.closed


async def test_a_slow_reader_gets_joined_deltas() -> None:
    async with make_engine(FakeExecutor(script("abcdefgh"))) as engine:
        slow = engine.submit(list(b"say>"), GREEDY)
        await engine.generate("say>", GREEDY)
        deltas = [d async for d in slow]
        assert len(deltas) == 1 and deltas[0].text == "abcdefgh" and deltas[0].finish_reason is FinishReason.STOP


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async with make_engine() as engine:
        first = engine.submit([65], GREEDY, request_id="mine")
        with pytest.raises(InvalidRequestError, match="'mine' is in use"):
            engine.submit([66], GREEDY, request_id="mine")
        await first.collect()
        assert (await engine.generate([66], GREEDY, request_id="mine")).request_id == "mine"


async def test_token_ids_must_be_whole_numbers() -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequestError, match="whole numbers"):
            engine.submit([5.5, 3])  # type: ignore[list-item]


async def test_a_drain_that_gives_up_tells_requests_that_were_not_seen_yet() -> None:
    gate = Gate()
    engine = make_engine(FakeExecutor(latency=gate.latency))
    async with engine:
        running = engine.submit([65], GREEDY)
        await to_thread.run_sync(gate.entered.acquire)
        unseen = engine.submit([66], GREEDY)
        await engine.drain(0)
        for stream in (running, unseen):
            with pytest.raises(DrainingError):
                await stream.collect()
        gate.open()


async def test_an_engine_task_that_is_cancelled_leaves_nobody_waiting() -> None:
    gate = Gate()
    engine = make_engine(FakeExecutor(latency=gate.latency))
    await engine.start()
    stream = engine.submit([65], GREEDY)
    await to_thread.run_sync(gate.entered.acquire)
    assert engine._task is not None
    engine._task.cancel()
    gate.open()
    with pytest.raises(EngineDeadError):
        await stream.collect()
    assert engine.status.state == "dead"
    with pytest.raises(EngineDeadError):
        engine.submit([65], GREEDY)


async def test_what_a_pinned_prompt_holds_is_not_promised_to_requests() -> None:
    async with make_engine(FakeExecutor(constant(65)), num_blocks=6, system_prompt="be as brief as you can") as engine:
        assert engine.max_model_len == 64
        out = await engine.generate("x" * 60, SamplingParams(max_tokens=50))
        assert out.finish_reason is FinishReason.LENGTH and out.usage.completion_tokens == 4


async def test_an_executor_that_cannot_begin_behind_a_prefix_pins_nothing() -> None:
    async with make_engine(system_prompt="be as brief as you can", shares_prefixes=False) as engine:
        numbers = engine.statistics()
        assert numbers.num_free_blocks == numbers.num_blocks
        assert b"brief" in bytes(await engine.encode_chat([{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize(("policy", "arguments"), [("window", {"max_batch_size": 2}), ("continuous", {})])
async def test_every_prompt_token_is_counted_once_also_in_chunks(policy: str, arguments: dict[str, int]) -> None:
    notes = Notes()
    engine = make_engine(policy=policy, policy_args=dict(arguments), max_num_batched_tokens=16)
    engine.add_observer(notes)
    async with engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        await asyncio.gather(engine.generate("a" * 33, params), engine.generate("b" * 50, params))
    assert (notes.prompt, notes.generated) == (83, 6)


async def test_who_can_join_at_the_next_step_takes_no_place_in_the_queue() -> None:
    gate = Gate()
    executor = FakeExecutor(latency=gate.latency)
    async with make_engine(executor, policy="continuous", policy_args={"max_num_seqs": 4}, max_queue=2) as engine:
        streams = [engine.submit([65], GREEDY)]
        await to_thread.run_sync(gate.entered.acquire)
        streams += [engine.submit([65], GREEDY) for _ in range(5)]  # three seats beside the one that runs, two wait
        with pytest.raises(QueueFullError):
            engine.submit([65], GREEDY)
        assert engine.statistics().num_free_seats == 3
        gate.open()
        for stream in streams:
            await stream.collect()
