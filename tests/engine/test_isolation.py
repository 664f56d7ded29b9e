"""One bad request, waiter or client harms no other: the cases that other servers got wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from anyio import to_thread

from microbatch.core.request import FinishReason, SamplingParams
from microbatch.errors import ExecutionError, InvalidRequestError
from microbatch.executor.fake import FakeExecutor
from tests.engine.factory import Gate, make_engine
from tests.engine.test_engine import GREEDY, Notes, all_free

pytestmark = pytest.mark.anyio
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


async def solo(prompt: str, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    """The answer of an engine that has nothing else to do."""
    async with make_engine(policy="serial") as engine:
        return (await engine.generate(prompt, params)).token_ids


async def test_in_a_batch_of_eight_only_the_bad_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails before the model, one behind it."""
    gate = Gate()
    executor = FakeExecutor(latency=gate.latency)
    async with make_engine(executor, policy_args={"max_batch_size": 7, "window_ms": 5000}) as engine:
        tokenizer = engine.tokenizer
        template = tokenizer.apply_chat_template

        def render(messages: Any, options: Any) -> list[int]:
            if messages[0]["content"] == "3":
                raise InvalidRequestError("the template does not like it")
            return template(messages, options)

        monkeypatch.setattr(tokenizer, "apply_chat_template", render)
        asked = [
            asyncio.create_task(engine.generate(messages=[{"role": "user", "content": str(i)}], params=GREEDY))
            for i in range(8)
        ]
        await to_thread.run_sync(gate.entered.acquire)
        live = list(engine.parts.loop.core._live.values())
        fifth = next(one.stream for one in live if bytes(one.sequence.request.prompt_token_ids).startswith(b"user: 5"))

        def no_text(token_id: int) -> str:
            raise ValueError("no text")

        monkeypatch.setattr(fifth._detokenizers[0], "push", no_text)
        gate.open()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all_free(engine)
    assert len(executor.plans[0].sequences) == 7
    assert isinstance(results[3], InvalidRequestError) and "does not like it" in str(results[3])
    assert isinstance(results[5], ExecutionError) and "no text" in str(results[5])
    for i in (0, 1, 2, 4, 6, 7):
        answer = results[i]
        assert not isinstance(answer, BaseException)
        assert answer.token_ids == await solo(f"user: {i}\nassistant:")


async def test_a_prompt_that_is_none_is_an_error_at_once_and_the_next_one_works() -> None:
    async with make_engine() as engine:
        with pytest.raises((InvalidRequestError, TypeError)):
            await asyncio.wait_for(engine.generate(None), 1)
        assert (await engine.generate("a", GREEDY)).token_ids == await solo("a")


async def test_waiters_that_gave_up_while_the_model_ran_are_not_missed() -> None:
    gate = Gate()
    executor = FakeExecutor(latency=gate.latency)
    async with make_engine(executor, policy_args={"max_batch_size": 20, "window_ms": 5000}) as engine:
        waiting = [asyncio.create_task(engine.generate(f"{i}", SHORT)) for i in range(20)]
        await to_thread.run_sync(gate.entered.acquire)
        for task in waiting[:5]:
            task.cancel()
        for task in waiting[5:8]:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.001)
        gate.open()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(r) for r in results[:8]] == [asyncio.CancelledError] * 8
        assert not any(isinstance(r, BaseException) for r in results[8:])
        again = await asyncio.gather(*[engine.generate(f"{i}", SHORT) for i in range(20)])
        assert len(again) == 20 and all_free(engine)


async def test_clients_that_time_out_in_the_window_do_not_fill_batches_nor_slow_what_follows() -> None:
    executor = FakeExecutor()
    notes = Notes()
    engine = make_engine(executor, policy_args={"max_batch_size": 10, "window_ms": 10_000})
    engine.add_observer(notes)
    async with engine:
        for prompt in "ab":  # before and after the impatient ones
            await asyncio.gather(*[engine.generate(f"{prompt}{i}", SHORT) for i in range(20)])
            assert notes.closed == [("size", 10)] * 2
            notes.closed.clear()
            if prompt == "b":
                break
            impatient = [asyncio.create_task(engine.generate(f"x{i}", SHORT)) for i in range(9)]
            while engine.statistics().num_waiting < 9:
                await asyncio.sleep(0)
            for task in impatient:
                task.cancel()
            await asyncio.gather(*impatient, return_exceptions=True)
            assert notes.closed == []
        assert all_free(engine)
    prompts = [bytes(s.token_ids) for plan in executor.plans for s in plan.sequences if s.start == 0]
    assert len(prompts) == 40 and not any(prompt.startswith(b"x") for prompt in prompts)


@pytest.mark.parametrize("policy", ["window", "continuous"])
async def test_places_of_requests_that_failed_are_free_again(policy: str) -> None:
    broken: list[bool] = [True]
    executor = FakeExecutor(fault=lambda plan: RuntimeError("boom") if broken else None)
    arguments = {"max_batch_size": 2, "window_ms": 1} if policy == "window" else {"max_num_seqs": 2}
    async with make_engine(executor, policy=policy, policy_args=arguments) as engine:
        for i in range(5):
            with pytest.raises(ExecutionError):
                await engine.generate(f"{i}", SHORT)
            assert all_free(engine)
        broken.clear()
        assert len(await asyncio.gather(*[engine.generate(t, SHORT) for t in "ab"])) == 2


async def test_a_prompt_over_the_token_budget_holds_up_nobody() -> None:
    executor = FakeExecutor()
    async with make_engine(executor, policy="continuous", max_num_batched_tokens=16) as engine:
        prompts = ["l" * 60, *"abcde"]
        answers = await asyncio.gather(*[engine.generate(p, GREEDY) for p in prompts])
        assert all_free(engine)
    assert [a.token_ids for a in answers] == [await solo(p) for p in prompts]
    assert max(sum(len(s.token_ids) for s in plan.sequences) for plan in executor.plans) == 16


async def test_an_abort_from_inside_the_iteration() -> None:
    async with make_engine() as engine:
        neighbour = asyncio.create_task(engine.generate("n", GREEDY))
        stream = engine.submit([65], SamplingParams(max_tokens=200, ignore_eos=True))
        last = None
        async for delta in stream:
            stream.abort()
            last = delta
        assert last is not None and last.finish_reason is FinishReason.ABORT
        engine.parts.loop.abort("never heard of")
        assert (await neighbour).token_ids == await solo("n") and engine.status.state == "ready"


async def test_eight_streams_of_broken_characters_do_not_mix() -> None:
    """Each prompt's tokens are bytes of half characters: joined they are those of a run alone."""

    characters = "😀🚀é中".encode()

    def half_emoji(context: Any, step: Any) -> int:
        place: int = (sum(context) * 7 + len(context)) % len(characters)
        return characters[place]

    async def joined(engine: Any, prompt: str) -> str:
        return "".join([delta.text async for delta in engine.stream(prompt, SamplingParams(max_tokens=9))])

    async with make_engine(FakeExecutor(half_emoji), policy="continuous") as engine:
        prompts = [f"p{i}" for i in range(8)]
        together = await asyncio.gather(*[joined(engine, p) for p in prompts])
        for prompt, text in zip(prompts, together, strict=True):
            alone = await engine.generate(prompt, SamplingParams(max_tokens=9))
            assert text == alone.text == bytes(alone.token_ids).decode(errors="replace")
            assert alone.usage.completion_tokens == 9
