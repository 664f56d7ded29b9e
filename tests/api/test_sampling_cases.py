"""Sampling as clients see it: a real forward and real sampling of a tiny model behind the whole server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from microbatch.core.policies import ContinuousPolicy
from microbatch.engine.client import AsyncEngine
from microbatch.engine.parts import EngineParts
from microbatch.wiring import assemble
from microbatch_kernels.manager import PagedKVManager
from tests.api.support import COMPLETIONS, events
from tests.api.test_request_cases import TinyTokenizer, complete, serving, texts, tiny_engine
from tests.executor import test_paged
from tests.executor.tiny import tiny_model

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7]
EOS = (2, 70)


class TwoEnds(TinyTokenizer):
    """A model that lists more than one end token."""

    eos_token_ids = frozenset(EOS)


def engine_of_two_ends() -> AsyncEngine:
    def build() -> EngineParts:
        executor = test_paged.executor_for(tiny_model("llama"), eos=EOS)
        kv, policy = PagedKVManager(128, test_paged.BLOCK), ContinuousPolicy(max_num_seqs=16)
        return assemble(executor, kv, policy, TwoEnds(), model_name="tiny", max_model_len=256)

    return AsyncEngine(build)


# B42
async def test_a_bias_forces_a_token_and_keeps_the_end_away() -> None:
    async with serving(tiny_engine()) as client:
        answer = await complete(client, PROMPT, logit_bias={"65": 100}, max_tokens=5, temperature=0)
        assert texts(answer) == ["AAAAA"]
        bias = {"2": -100, "66": 99, "65": -100}
        answer = await complete(client, PROMPT, logit_bias=bias, max_tokens=5, temperature=0)
        assert texts(answer) == ["BBBBB"] and answer["choices"][0]["finish_reason"] == "length"
        empty = await complete(client, PROMPT, logit_bias={}, max_tokens=5, temperature=0)
        absent = await complete(client, PROMPT, logit_bias=None, max_tokens=5, temperature=0)
        assert texts(empty) == texts(absent) != ["AAAAA"]


# B47
async def test_extreme_values_choose_the_best_token_and_do_not_reach_the_neighbour() -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    neighbour = {**fields, "temperature": 0.8, "seed": 42}
    coldest: list[dict[str, Any]] = [{"temperature": t, "seed": 3} for t in (0, 1e-10, 1e-5, 1e-4)]
    narrow: list[dict[str, Any]] = [{"temperature": 1, "seed": 3, "top_p": p} for p in (0, 1e-9)]
    widest: list[dict[str, Any]] = [
        {"temperature": 2, "top_p": 1, "min_p": 0, "top_k": -1},
        {"repetition_penalty": 1e-3, "temperature": 2},
    ]
    async with serving(tiny_engine()) as client:
        greedy = texts(await complete(client, PROMPT, temperature=0, **fields))
        alone = texts(await complete(client, PROMPT, **neighbour))
        assert alone != greedy
        for extreme in (*coldest, *narrow, *widest):
            jobs = [complete(client, PROMPT, **{**fields, **extreme}), complete(client, PROMPT, **neighbour)]
            row, other = await asyncio.gather(*jobs)
            assert texts(other) == alone
            assert texts(row) == greedy or extreme in widest


# B56
@pytest.mark.parametrize("end", EOS)
async def test_each_of_several_end_tokens_ends_and_is_not_shown(end: int) -> None:
    forced = {"logit_bias": {str(end): 100}, "temperature": 0, "max_tokens": 6, "logprobs": 0}
    async with serving(engine_of_two_ends()) as client:
        (choice,) = (await complete(client, PROMPT, **forced))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        answer = await complete(client, PROMPT, **forced, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 6
        answer = await complete(client, PROMPT, **forced, ignore_eos=True, stop_token_ids=[end])
        assert answer["choices"][0]["finish_reason"] == "stop"


# B56
@pytest.mark.parametrize("end", EOS)
async def test_min_tokens_hold_back_every_end_token(end: int) -> None:
    fields = {"logit_bias": {str(end): 100, "65": 50}, "temperature": 0, "max_tokens": 9, "min_tokens": 5}
    async with serving(engine_of_two_ends()) as client:
        (choice,) = (await complete(client, PROMPT, **fields))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("AAAAA", "stop")


# B57
async def test_a_seeded_answer_is_the_same_in_any_company_and_place() -> None:
    seeded: dict[str, Any] = {"seed": 42, "temperature": 0.8, "max_tokens": 12, "ignore_eos": True}
    free = {**seeded, "seed": None}
    async with serving(tiny_engine()) as client:
        alone = texts(await complete(client, PROMPT, **seeded))
        for company in ([], [free], [{**seeded, "seed": 7}], [free] * 5, [seeded]):
            for place in {0, len(company)}:
                rows = [*company[:place], seeded, *company[place:]]
                answers = await asyncio.gather(*(complete(client, PROMPT, **row) for row in rows))
                assert texts(answers[place]) == alone
        jobs = [complete(client, PROMPT, **free) for _ in range(4)]
        assert len({text for answer in await asyncio.gather(*jobs) for text in texts(answer)}) > 1
        for seed in (0, -1, 2**63):
            await complete(client, PROMPT, **{**seeded, "seed": seed})


# B59
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_number_of_alternatives_and_the_chosen_token(count: int) -> None:
    fields = {"logprobs": count, "max_tokens": 6, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    async with serving(tiny_engine()) as client:
        plain = (await complete(client, PROMPT, **fields))["choices"][0]["logprobs"]
        response = await client.post(COMPLETIONS, content=json.dumps({"prompt": PROMPT, "stream": True, **fields}))
        streamed = [e["choices"][0]["logprobs"] for e in events(response) if e["choices"]]
        assert [v for part in streamed if part for v in part["token_logprobs"]] == plain["token_logprobs"]
        assert len(plain["token_logprobs"]) == 6 and all(value <= 0 for value in plain["token_logprobs"])
        if not count:
            assert not plain["top_logprobs"]
            return
        for name, value, best in zip(plain["tokens"], plain["token_logprobs"], plain["top_logprobs"], strict=True):
            assert best[name] == value and count <= len(best) <= count + 1
            assert len(best) == count or value == min(best.values())
