"""Faults that users of other servers met, asked of the whole server over scripted steps or a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from microbatch.api.app import create_app
from microbatch.core.policies import ContinuousPolicy
from microbatch.engine.client import AsyncEngine
from microbatch.engine.parts import EngineParts
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.wiring import assemble
from microbatch_kernels.manager import PagedKVManager
from tests.api.support import CHAT, COMPLETIONS, client_of, error_of, events
from tests.engine.factory import make_engine
from tests.executor import test_paged
from tests.executor.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.anyio
LIMIT = 64
POLICIES = ["window", "continuous"]


class TinyTokenizer(ByteTokenizer):
    """The ids of the tiny models are bytes."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({2})


@contextlib.asynccontextmanager
async def serving(engine: AsyncEngine) -> AsyncIterator[httpx2.AsyncClient]:
    async with engine, client_of(create_app(engine)) as client:
        yield client
        engine.parts.loop.core.scheduler.check_integrity()
        assert engine.statistics().num_free_blocks == engine.statistics().num_blocks


def tiny_engine() -> AsyncEngine:
    """A real model and real sampling."""

    def build() -> EngineParts:
        executor = test_paged.executor_for(tiny_model("llama"))
        kv, policy = PagedKVManager(128, test_paged.BLOCK), ContinuousPolicy(max_num_seqs=16)
        return assemble(executor, kv, policy, TinyTokenizer(), model_name="tiny", max_model_len=256)

    return AsyncEngine(build)


async def complete(client: httpx2.AsyncClient, prompt: Any = "Hi", **fields: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, content=json.dumps({"prompt": prompt, **fields}))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("policy", POLICIES)
async def test_b37_prompts_around_the_limit_while_others_stream(policy: str) -> None:
    async with serving(make_engine(policy=policy, max_model_len=LIMIT)) as client:
        fields = {"prompt": "stream", "stream": True, "max_tokens": 30, "ignore_eos": True}
        streams = [asyncio.create_task(client.post(COMPLETIONS, content=json.dumps(fields))) for _ in range(4)]
        assert (await complete(client, [65] * (LIMIT - 1), max_tokens=1))["usage"]["prompt_tokens"] == LIMIT - 1
        for length in (LIMIT, LIMIT + 1, 4 * LIMIT):
            for path, prompt in (
                (COMPLETIONS, {"prompt": [65] * length}),
                (COMPLETIONS, {"prompt": "A" * length}),
                (CHAT, {"messages": [{"role": "user", "content": "A" * length}]}),
            ):
                for stream in (False, True):
                    response = await client.post(path, content=json.dumps({**prompt, "stream": stream}))
                    error = error_of(response)
                    assert error["code"] == "context_length_exceeded" and str(LIMIT) in error["message"]
        answers = [events(await stream) for stream in streams]
        assert all(answer[-1]["choices"][0]["finish_reason"] == "length" for answer in answers)
        assert len({"".join(event["choices"][0]["text"] for event in answer) for answer in answers}) == 1


@pytest.mark.parametrize("policy", POLICIES)
async def test_b38_more_tokens_than_the_context_has_end_there(policy: str) -> None:
    async with serving(make_engine(policy=policy, max_model_len=LIMIT)) as client:
        for most in (LIMIT, LIMIT * 10, 10**12):
            answer = await complete(client, "0123456789", max_tokens=most, ignore_eos=True)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == LIMIT - 10
            assert answer["usage"]["total_tokens"] == LIMIT


@pytest.mark.parametrize("policy", POLICIES)
async def test_b40_a_whole_context_may_be_scored_when_nothing_is_generated(policy: str) -> None:
    async with serving(make_engine(policy=policy, max_model_len=LIMIT)) as client:
        answer = await complete(client, [65] * LIMIT, max_tokens=0, echo=True, logprobs=1)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == LIMIT
        assert answer["usage"] == {
            "prompt_tokens": LIMIT,
            "completion_tokens": 0,
            "total_tokens": LIMIT,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        content = json.dumps({"prompt": [65] * (LIMIT + 1), "max_tokens": 0, "echo": True})
        assert error_of(await client.post(COMPLETIONS, content=content))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("policy", POLICIES)
async def test_b53_each_of_several_prompts_is_answered_as_alone(policy: str) -> None:
    fields: dict[str, Any] = {"n": 2, "echo": True, "temperature": 0, "max_tokens": 4, "logprobs": 1}
    async with serving(make_engine(policy=policy)) as client:
        alone = [await complete(client, prompt, **fields) for prompt in ("A", "Bb", "Ccc")]
        together = await complete(client, ["A", "Bb", "Ccc"], **fields)
        assert [choice["index"] for choice in together["choices"]] == list(range(6))
        assert texts(together) == [text for answer in alone for text in texts(answer)]
        assert [c["logprobs"] for c in together["choices"]] == [c["logprobs"] for a in alone for c in a["choices"]]
        for name in ("prompt_tokens", "completion_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)


async def test_b58_choices_of_one_seed_differ_and_come_again() -> None:
    fields: dict[str, Any] = {"n": 4, "seed": 1, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
    async with serving(tiny_engine()) as client:
        first, again = await complete(client, [5, 6, 7], **fields), await complete(client, [5, 6, 7], **fields)
        assert texts(first) == texts(again) and len(set(texts(first))) > 1
        assert first["usage"]["prompt_tokens"] == 3 and first["usage"]["completion_tokens"] == 32
        assert len(set(texts(await complete(client, [5, 6, 7], **{**fields, "temperature": 0})))) == 1


async def test_b58_best_of_gives_the_likeliest_of_the_same_choices() -> None:
    fields: dict[str, Any] = {"seed": 1, "temperature": 1, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    async with serving(tiny_engine()) as client:
        every = (await complete(client, [5, 6, 7], n=4, **fields))["choices"]
        best = await complete(client, [5, 6, 7], n=2, best_of=4, **fields)

        def likely(choice: dict[str, Any]) -> float:
            return float(sum(choice["logprobs"]["token_logprobs"]))

        assert texts(best) == [choice["text"] for choice in sorted(every, key=likely, reverse=True)[:2]]
        assert best["usage"]["completion_tokens"] == 32


async def test_b60_a_scored_prompt_is_the_same_alone_and_in_a_batch() -> None:
    prompts = [[5 + i % 60 for i in range(length)] for length in (1, 3, 17, 40)]
    async with serving(tiny_engine()) as client:
        alone = [await complete(client, p, echo=True, logprobs=2, max_tokens=1, temperature=0) for p in prompts]
        jobs = [complete(client, p, echo=True, logprobs=2, max_tokens=1, temperature=0) for p in prompts]
        for prompt, a, b in zip(prompts, alone, await asyncio.gather(*jobs), strict=True):
            one, other = a["choices"][0]["logprobs"], b["choices"][0]["logprobs"]
            assert len(one["tokens"]) == len(prompt) + 1 and one["token_logprobs"][0] is None
            assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-4)
            assert (one["tokens"], one["text_offset"]) == (other["tokens"], other["text_offset"])


async def test_b61_logprobs_do_not_depend_on_the_sampling() -> None:
    async with serving(tiny_engine()) as client:
        seen = []
        for fields in ({"temperature": 0}, {"temperature": 1, "top_p": 0.5, "seed": 1}, {"temperature": 2, "top_k": 1}):
            answer = await complete(client, [5, 6, 7], logprobs=5, max_tokens=1, **fields)
            best = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            seen.append(sorted(best.items(), key=lambda item: -item[1])[:5])
        assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 5
