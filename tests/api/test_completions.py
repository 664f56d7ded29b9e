"""``/v1/completions``: forms of the prompt, choices, usage, echo, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.core.request import FinishReason
from microbatch.errors import ContextLengthError, ExecutionError, QueueFullError
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import COMPLETIONS, MODEL, error_of, events, post

pytestmark = pytest.mark.anyio


async def complete(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, COMPLETIONS, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_an_answer() -> None:
    engine = FakeEngine(default=Script(b"Hello", cached_tokens=1))
    answer = await complete(engine)
    assert answer["id"].startswith("cmpl-") and isinstance(answer["created"], int)
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert engine.requests[0].request_id == f"{answer['id']}-0"
    assert engine.aborted == []


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [b"Hi"]),
        (["A", "BC"], [b"A", b"BC"]),
        ([72, 105], [b"Hi"]),
        ([[72], [105, 33]], [b"H", b"i!"]),
        ("a\x00b", [b"a\x00b"]),
    ],
)
async def test_forms_of_the_prompt(prompt: Any, ids: list[bytes]) -> None:
    engine = FakeEngine()
    answer = await complete(engine, prompt=prompt)
    assert [bytes(request.prompt_token_ids) for request in engine.requests] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_of_several_prompts_come_in_order() -> None:
    engine = FakeEngine()
    engine.scripts.extend([Script(b"long text"), Script(b"b"), Script(b"cc")])
    answer = await complete(engine, prompt=["A", "B", "C"], n=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "long text"),
        (1, "long text"),
        (2, "b"),
        (3, "b"),
        (4, "cc"),
        (5, "cc"),
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * (9 + 1 + 2)


async def test_sixteen_tokens_by_default() -> None:
    for fields in ({}, {"max_tokens": None}):
        engine = FakeEngine(default=Script(b"x" * 40))
        answer = await complete(engine, **fields)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("x" * 16, "length")


async def test_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    fields = dict(max_tokens=7, temperature=0.5, top_p=0.9, n=2, seed=3, presence_penalty=1, frequency_penalty=-1)
    fields |= dict(top_k=4, min_p=0.1, repetition_penalty=1.2, ignore_eos=True, min_tokens=2)
    other = dict(stop=["a", "b"], stop_token_ids=[9], logit_bias={"5": 1.5}, priority=2, cache_salt="s", logprobs=2)
    hints = dict(user="me", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x")
    await complete(engine, **fields, **other, **hints, best_of=2)
    request = engine.requests[0]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert (request.params.stop, request.params.stop_token_ids) == (("a", "b"), (9,))
    assert (request.params.logit_bias, request.params.logprobs) == ({5: 1.5}, 2)
    assert (request.priority, request.cache_salt, request.client) == (2, "s", "127.0.0.1")


async def test_a_stop_text_is_cut() -> None:
    engine = FakeEngine(default=Script(b"one two three", hold=True))
    answer = await complete(engine, stop=" th")
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one two", "stop")


async def test_half_a_character_at_the_end() -> None:
    engine = FakeEngine(default=Script("é😀".encode()))
    plain = await complete(engine, max_tokens=4)
    assert plain["choices"][0]["text"] == "é\ufffd"
    stream = events(await post(engine, COMPLETIONS, max_tokens=4, stream=True))
    assert [event["choices"][0]["text"] for event in stream] == ["é", "\ufffd"]


@pytest.mark.parametrize(("prompt", "echoes"), [("Hi ", ["Hi "]), ([72, 105], ["Hi"]), (["A", "B"], ["A", "B"])])
async def test_echo(prompt: Any, echoes: list[str]) -> None:
    engine = FakeEngine()
    answer = await complete(engine, prompt=prompt, n=2, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == [echo + "Hello" for echo in echoes for _ in range(2)]
    stream = events(await post(engine, COMPLETIONS, prompt=prompt, n=2, echo=True, stream=True))
    texts = ["" for _ in answer["choices"]]
    for event in stream:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


async def test_echo_of_an_empty_answer() -> None:
    engine = FakeEngine(default=Script(b""))
    assert (await complete(engine, echo=True))["choices"][0]["text"] == "Hi"
    stream = events(await post(engine, COMPLETIONS, echo=True, stream=True))
    assert [(c["text"], c["finish_reason"]) for e in stream for c in e["choices"]] == [("Hi", "stop")]


async def test_logprobs() -> None:
    engine = FakeEngine(default=Script("aé".encode()))
    logprobs = (await complete(engine, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"A": -1.0, "B": -2.0, "a": -0.5},
            {"A": -1.0, "B": -2.0, "bytes:\\xc3": -0.5},
            {"A": -1.0, "B": -2.0, "bytes:\\xa9": -0.5},
        ],
        "text_offset": [0, 1, 1],
    }


async def test_logprobs_of_the_chosen_token_only() -> None:
    logprobs = (await complete(FakeEngine(), logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"] is None
    assert "".join(logprobs["tokens"]) == "Hello"


async def test_streamed_logprobs_equal_plain_ones() -> None:
    engine = FakeEngine(default=Script(b"abcdef"))
    plain = (await complete(engine, logprobs=1, stop="ef"))["choices"][0]["logprobs"]
    stream = events(await post(engine, COMPLETIONS, logprobs=1, stop="ef", stream=True))
    parts = [c["logprobs"] for e in stream for c in e["choices"] if c["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == plain[name]


async def test_an_error_of_the_request_is_told() -> None:
    engine = FakeEngine(default=Script(b"He", error=ExecutionError("logits are not numbers")))
    error = error_of(await post(engine, COMPLETIONS), 500)
    assert (error["message"], error["code"]) == ("logits are not numbers", "execution_failed")


@pytest.mark.parametrize(("finish", "status"), [(FinishReason.ABORT, 503), (FinishReason.ERROR, 500)])
async def test_an_answer_that_was_cut_off_is_an_error(finish: FinishReason, status: int) -> None:
    error_of(await post(FakeEngine(default=Script(b"He", finish)), COMPLETIONS), status)


async def test_one_failing_prompt_aborts_the_others() -> None:
    engine = FakeEngine()
    engine.scripts.extend([Script(hold=True), Script(error=ExecutionError("bad")), Script(hold=True)])
    error_of(await post(engine, COMPLETIONS, prompt=["A", "B", "C"]), 500)
    assert {request.rsplit("-", 1)[1] for request in engine.aborted} == {"0", "2"}


async def test_a_refused_submission_aborts_the_earlier_ones() -> None:
    for stream in (False, True):
        engine = FakeEngine(default=Script(hold=True))
        engine.refusals.extend([None, None, QueueFullError("the queue is full", retry_after=3)])
        response = await post(engine, COMPLETIONS, prompt=["A", "B", "C"], stream=stream)
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "3"
        assert len(engine.aborted) == 2


async def test_a_prompt_too_long_is_refused_before_any_event() -> None:
    engine = FakeEngine()
    for prompt in ("x" * 512, [5] * 512, [5] * 100_000):
        for stream in (False, True):
            error = error_of(await post(engine, COMPLETIONS, prompt=prompt, stream=stream))
            assert error["code"] == ContextLengthError.code
            assert "512" in error["message"]


async def test_more_prompts_than_the_queue_can_ever_hold_are_refused_before_any_is_submitted() -> None:
    engine = FakeEngine()
    error = error_of(await post(engine, COMPLETIONS, prompt=["a"] * 100, n=3))
    assert "300" in error["message"] and error["param"] == "prompt" and not engine.requests
