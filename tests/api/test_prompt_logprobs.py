"""``echo`` with ``logprobs``, and ``prompt_logprobs``: what is told of the tokens of a prompt (case B60)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from microbatch.executor.fake import prompt_scores
from microbatch.text.tokenizer import HFTokenizer
from tests.api.fake_engine import FakeEngine
from tests.api.support import BOTH, CHAT, COMPLETIONS, error_of, events, post
from tests.text.toy_tokenizers import byte_level_backend, raw_tokenizer, sentencepiece_backend

pytestmark = pytest.mark.anyio


async def choice_of(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, COMPLETIONS, **fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def scores(prompt: bytes) -> list[float]:
    return [entry.logprob for entry in prompt_scores(prompt[1:], 0)]


@pytest.mark.parametrize("new", [0, 1, 3])
async def test_prompt_and_answer_are_one_list(new: int) -> None:
    choice = await choice_of(FakeEngine(), prompt="Hey", echo=True, logprobs=1, max_tokens=new)
    assert choice["text"] == "Hey" + "Hello"[:new] and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(choice["text"])
    assert logprobs["token_logprobs"] == [None, *scores(b"Hey"), *[-0.5] * new]
    assert logprobs["text_offset"] == list(range(3 + new))
    assert logprobs["top_logprobs"][:3] == [None, {"e": -0.25}, {"y": -0.25}]
    assert len(logprobs["top_logprobs"]) == 3 + new


async def test_a_prompt_alone_counts_no_token() -> None:
    response = await post(FakeEngine(), COMPLETIONS, prompt="Hey", echo=True, max_tokens=0)
    assert response.json()["usage"]["completion_tokens"] == 0
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("Hey", None, "length")


async def test_logprobs_0_has_no_alternatives() -> None:
    logprobs = (await choice_of(FakeEngine(), prompt="Hey", echo=True, logprobs=0, max_tokens=1))["logprobs"]
    assert logprobs["top_logprobs"] is None and len(logprobs["token_logprobs"]) == 4


async def test_one_token_follows_nothing() -> None:
    logprobs = (await choice_of(FakeEngine(), prompt=[72], echo=True, logprobs=2, max_tokens=0))["logprobs"]
    assert logprobs == {"tokens": ["H"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@pytest.mark.parametrize("prompt", ["Hey", ["A b", "Cde"], [[72, 105], [33]]])
async def test_streamed_equal_plain_ones(prompt: Any) -> None:
    fields = dict(prompt=prompt, echo=True, logprobs=2, max_tokens=4, n=2)
    plain = (await post(FakeEngine(), COMPLETIONS, **fields)).json()["choices"]
    streamed: dict[int, dict[str, list[Any]]] = {}
    for event in events(await post(FakeEngine(), COMPLETIONS, **fields, stream=True)):
        for choice in event["choices"]:
            lists = streamed.setdefault(choice["index"], {"text": []})
            lists["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                lists.setdefault(name, []).extend(values)
    assert streamed == {c["index"]: {"text": list(c["text"]), **c["logprobs"]} for c in plain}


async def test_offsets_of_characters_of_several_bytes() -> None:
    choice = await choice_of(FakeEngine(), prompt="é😀!", echo=True, logprobs=0, max_tokens=1)
    assert choice["text"] == "é😀!H"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert choice["logprobs"]["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]


async def test_half_a_character_at_the_end_of_the_prompt() -> None:
    choice = await choice_of(FakeEngine(), prompt=[65, 0xF0, 0x9F], echo=True, logprobs=0, max_tokens=1)
    assert choice["text"] == "A\ufffdH" and choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("make", "prompt"),
    [
        (byte_level_backend, "the <|im_start|>user café"),
        (byte_level_backend, "<|im_end|>"),
        (byte_level_backend, "a  b\n"),
        (byte_level_backend, "😀 x"),
        (sentencepiece_backend, "The capital"),
        (sentencepiece_backend, "The capital</s> of 文é😀"),
        (sentencepiece_backend, " a"),
    ],
)
async def test_offsets_are_places_in_the_text(make: Callable[[], Any], prompt: str) -> None:
    """Every token stands where the text says, special ones that the text spells out too."""
    raw = raw_tokenizer(make())
    engine = FakeEngine(tokenizer=HFTokenizer(raw, len(raw), [2]))
    choice = await choice_of(engine, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == prompt and offsets[0] == 0 and offsets == sorted(offsets)
    whole = 0
    for token, offset, end in zip(tokens, offsets, [*offsets[1:], len(prompt)]):
        if not token.startswith("bytes:") and end > offset:
            assert prompt[offset:end].strip() == token.strip(), (token, offset, end)
            whole += 1
    assert whole >= 1


async def test_vllm_form_of_a_completion() -> None:
    choice = await choice_of(FakeEngine(), prompt="Hey", prompt_logprobs=1, max_tokens=1)
    first, second, third = choice["prompt_logprobs"]
    values = scores(b"Hey")
    assert first is None
    assert second == {str(ord("e")): {"logprob": values[0], "rank": 2, "decoded_token": "e"}}
    assert third == {str(ord("y")): {"logprob": values[1], "rank": 2, "decoded_token": "y"}}
    assert choice["text"] == "H" and choice["logprobs"] is None


async def test_vllm_form_beside_echo_has_its_own_number_of_alternatives() -> None:
    engine = FakeEngine()
    choice = await choice_of(engine, prompt="Hey", prompt_logprobs=4, echo=True, logprobs=2, n=2)
    assert engine.requests[0].params.prompt_logprobs == 4
    assert len(choice["prompt_logprobs"]) == 3 and "prompt_logprobs" not in choice["logprobs"]


async def test_vllm_form_of_a_chat() -> None:
    engine = FakeEngine()
    answer = (await post(engine, CHAT, prompt_logprobs=0, n=2)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] and answer["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in (await post(FakeEngine(), CHAT)).json()


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "x"])
async def test_wrong_numbers_of_alternatives(path: str, value: Any) -> None:
    assert error_of(await post(FakeEngine(), path, prompt_logprobs=value))["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", BOTH)
async def test_nothing_to_do_is_refused(path: str) -> None:
    name = "max_tokens" if path == COMPLETIONS else "max_completion_tokens"
    error = error_of(await post(FakeEngine(), path, **{name: 0}))
    assert error["param"] == name and "at least 1" in error["message"]
