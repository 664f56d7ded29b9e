"""The embedded model, whole: greedy text equals plain transformers on one prompt, in every company and by every way.

A difference is excused only where the two best logits of the reference are closer than ``TIE``: there float32 rounding
decides.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from microbatch import LLM, Engine, SamplingParams
from microbatch.core.request import FinishReason

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TIE = 1e-3
COUNT = 12
SYSTEM = "You are a librarian. You answer in short sentences, politely, and you never make anything up at all."
QUESTIONS = ("What is the capital of France?", "Name one color.", "Write one sentence about the sea.", "What is 2+2?")


class Reference(NamedTuple):
    """Tokens of plain generate, and at each the distance of the two best logits."""

    token_ids: list[int]
    gaps: list[float]


class Oracle:
    """Plain transformers: batch of one, its own attention, its own cache."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], Reference] = {}

    def greedy(self, prompt: list[int]) -> Reference:
        """COUNT tokens, or fewer and the end token."""
        import torch
        from transformers import GenerationConfig

        key = tuple(prompt)
        if key not in self._known:
            ids = torch.tensor([prompt])
            config = GenerationConfig(
                max_new_tokens=COUNT,
                do_sample=False,
                eos_token_id=2,
                pad_token_id=2,
                return_dict_in_generate=True,
                output_scores=True,
            )
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            gaps = [float(s[0].topk(2).values.diff().abs()) for s in out.scores]
            self._known[key] = Reference(out.sequences[0, len(prompt) :].tolist(), gaps)
        return self._known[key]

    def logprobs(self, prompt: list[int]) -> list[float]:
        """Of each token behind the first, by one plain forward."""
        import torch

        with torch.no_grad():
            rows = self._model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return [float(row[token_id]) for row, token_id in zip(rows, prompt[1:])]

    def chat(self, question: str, system: str | None) -> list[int]:
        """Prompt of a conversation, by transformers alone."""
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def check(self, prompt: list[int], token_ids: tuple[int, ...], finish: FinishReason) -> None:
        """The answer must be the reference, the end token left out."""
        expected = self.greedy(prompt)
        ended = expected.token_ids[-1] == 2
        shown = expected.token_ids[:-1] if ended else expected.token_ids
        if list(token_ids) == shown:
            assert finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
            return
        at = next((i for i, (a, b) in enumerate(zip(shown, token_ids)) if a != b), min(len(shown), len(token_ids)))
        gap = expected.gaps[at]
        assert gap < TIE, f"token {at} of {len(prompt)} prompt tokens differs where the best logits are {gap:.4f} apart"


@pytest.fixture(scope="module")
def oracle(embedded_model: Path) -> Iterator[Oracle]:
    yield Oracle(embedded_model)


def mixed_prompts(oracle: Oracle) -> list[list[int]]:
    """Lengths from 1 to 1,000 tokens, text and nonsense."""
    rnd = random.Random(5)
    text = "The river was wide and slow, and the boats went down it one after the other. " * 80
    ids = oracle.tokenizer(text).input_ids
    lengths = (1, 3, 15, 16, 17, 120, 400, 1000)
    return [
        ids[i : i + n] if i % 2 == 0 else [rnd.randrange(20, 40_000) for _ in range(n)] for i, n in enumerate(lengths)
    ]


GREEDY = SamplingParams(max_tokens=COUNT, temperature=0)


@pytest.mark.parametrize("policy", ["window", "serial"])
@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared prefix"])
async def test_greedy_equals_transformers_in_every_mix(oracle: Oracle, policy: str, shared: bool) -> None:
    system = SYSTEM if shared else None
    prompts = mixed_prompts(oracle)
    chats = [oracle.chat(question, system) for question in QUESTIONS]
    async with Engine(policy=policy, system_prompt=system, max_model_len=2048) as engine:
        held = engine.statistics()
        assert (held.num_blocks - held.num_free_blocks > 0) is shared
        jobs = [engine.generate(prompt, GREEDY) for prompt in prompts]
        messages: list[list[dict[str, object]]] = [[{"role": "user", "content": q}] for q in QUESTIONS]
        jobs += [engine.generate(messages=m, params=GREEDY) for m in messages]
        outs = await asyncio.gather(*jobs)
        for prompt, out in zip(prompts + chats, outs, strict=True):
            oracle.check(prompt, out.token_ids, out.finish_reason)
        if shared:
            assert all(out.usage.cached_tokens >= 16 for out in outs[len(prompts) :])
        streamed = await asyncio.gather(*[collect(engine, prompt) for prompt in prompts[1:6:2]])
        for prompt, out, (text, token_ids, finish) in zip(prompts[1:6:2], outs[1:6:2], streamed, strict=True):
            oracle.check(prompt, token_ids, finish)
            assert text == out.text == engine.tokenizer.decode(out.token_ids)
        engine.parts.loop.core.scheduler.check_integrity()
        after = engine.statistics()
        assert after.num_free_blocks == held.num_free_blocks and not after.num_running


async def collect(engine: Engine, prompt: list[int]) -> tuple[str, tuple[int, ...], FinishReason]:
    deltas = [delta async for delta in engine.stream(prompt, GREEDY)]
    finish = deltas[-1].finish_reason
    assert finish is not None
    return "".join(d.text for d in deltas), tuple(t for d in deltas for t in d.token_ids), finish


async def test_any_order_of_four_prompts_gives_the_same_answers(oracle: Oracle) -> None:
    texts = ["Hi", "The capital of France is", "word " * 200 + "and", "Count: 1, 2, 3,"]
    prompts = [oracle.tokenizer(text).input_ids for text in texts]
    params = SamplingParams(max_tokens=4, temperature=0)
    rnd = random.Random(1)
    async with Engine(max_batch_size=4, max_model_len=512) as engine:
        for _ in range(6):
            order = rnd.sample(range(4), 4)
            outs = await asyncio.gather(*[engine.generate(prompts[i], params) for i in order])
            for i, out in zip(order, outs, strict=True):
                expected = oracle.greedy(prompts[i])
                assert list(out.token_ids) == expected.token_ids[:4] or min(expected.gaps[:4]) < TIE


@pytest.mark.parametrize("policy", ["continuous", "window"])
async def test_prompts_are_scored_as_by_a_plain_forward(oracle: Oracle, policy: str) -> None:
    """Case B60: in a batch of many lengths, in chunks, twice so that a prefix is cached; neighbours are not scored."""
    prompts = mixed_prompts(oracle)
    right = [oracle.logprobs(prompt) for prompt in prompts]
    params = [SamplingParams(max_tokens=k % 2, temperature=0, prompt_logprobs=k % 3) for k in range(len(prompts))]
    async with Engine(policy=policy, max_model_len=2048, max_num_batched_tokens=256) as engine:
        for _ in range(2):
            jobs = [engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
            outs = (await asyncio.gather(*jobs, engine.generate(prompts[3], GREEDY)))[:-1]
            for expected, out in zip(right, outs, strict=True):
                assert [entry.logprob for entry in out.prompt_logprobs or ()] == pytest.approx(expected, abs=1e-3)


async def test_seeds_hold_beside_any_neighbours(embedded_model: Path) -> None:
    seeded = SamplingParams(max_tokens=12, temperature=0.8, seed=42, top_p=0.95)
    others = [SamplingParams(max_tokens=12, temperature=1.0, seed=7 if i % 2 else None) for i in range(5)]
    async with Engine(max_model_len=512) as engine:
        alone = await engine.generate("Once upon a time there was", seeded)
        for place in (0, 3):
            jobs = [engine.generate("Once upon a time there was", p) for p in others]
            jobs.insert(place, engine.generate("Once upon a time there was", seeded))
            outs = await asyncio.gather(*jobs)
            assert outs[place].text == alone.text
        assert len({out.text for out in outs}) > 3


def test_the_synchronous_face(embedded_model: Path) -> None:
    with LLM(max_model_len=256, max_batch_size=4) as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        outs = llm.generate(["The capital of France is", "Count: 1, 2, 3,"] * 3, params, progress=False)
        assert [out.text for out in outs[:2]] * 3 == [out.text for out in outs] and "Paris" in outs[0].text
        (chat,) = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]], params, progress=False)
        assert "capital" in chat.text
        with pytest.raises(ValueError, match="2 prompts need 2 sets"):
            llm.generate(["a", "b"], [params], progress=False)


def test_a_script_that_never_closes_its_llm_ends(embedded_model: Path) -> None:
    script = """
from microbatch import LLM, SamplingParams

llm = LLM(max_model_len=128, max_queue=4)
print(len(llm.generate(["One, two,"] * 12, SamplingParams(max_tokens=2, n=2), progress=False)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr


async def test_int8_on_request(oracle: Oracle) -> None:
    """Weights in 8 bits answer sensibly, alone and in company. Needs bitsandbytes, which comes with the package."""
    async with Engine(quantization="int8", max_model_len=256) as engine:
        outs = await asyncio.gather(*[engine.generate("The capital of France is", GREEDY) for _ in range(3)])
        assert all("Paris" in out.text for out in outs)
