"""``/v1/chat/completions``: messages, parts, tool history, choices, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.errors import InvalidRequestError
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import CHAT, MODEL, error_of, post

pytestmark = pytest.mark.anyio

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


async def chat(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, CHAT, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def seen(*messages: dict[str, Any]) -> list[dict[str, object]]:
    """What the engine gets of a conversation."""
    engine = FakeEngine()
    await chat(engine, messages=list(messages))
    return engine.messages


async def test_an_answer() -> None:
    engine = FakeEngine()
    answer = await chat(engine)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("user: Hi\nassistant:")
    assert engine.requests[0].params.max_tokens is None


async def test_several_choices() -> None:
    answer = await chat(FakeEngine(), n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}]
)
async def test_both_names_of_the_limit(fields: dict[str, int]) -> None:
    answer = await chat(FakeEngine(), **fields)
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("Hel", "length")


async def test_roles() -> None:
    roles = [
        m["role"]
        for m in await seen(*({"role": r, "content": "x"} for r in ("developer", "system", "user", "assistant")))
    ]
    assert roles == ["system", "system", "user", "assistant"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ab", "ab"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text", "text": "ab", "cache_control": None}], "ab"),
        ([], ""),
        ("", ""),
    ],
)
async def test_content_becomes_text(content: Any, text: str) -> None:
    assert await seen({"role": "user", "content": content}) == [{"role": "user", "content": text}]


@pytest.mark.parametrize("extra", [{}, {"content": None}, {"content": ""}, {"content": []}])
async def test_an_assistant_that_called_tools_needs_no_content(extra: dict[str, Any]) -> None:
    messages = await seen(
        {"role": "user", "content": "Hi", "name": "me"},
        {"role": "assistant", "tool_calls": [CALL], **extra},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    )
    assert messages == [
        {"role": "user", "content": "Hi", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("arguments", ["", "no JSON", "5", "[" * 100_000])
async def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = await seen({"role": "assistant", "content": "x", "tool_calls": [call]})
    assert message["tool_calls"] == [call]


async def test_a_message_of_an_answer_can_be_sent_back() -> None:
    answer = await chat(FakeEngine())
    back = {
        **answer["choices"][0]["message"],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "annotations": [],
    }
    assert await seen({"role": "user", "content": "Hi"}, back) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        (["Hi"], "messages[0]"),
        ([None], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": None, "content": "Hi"}], "messages[0].role"),
        ([{"role": 5, "content": "Hi"}], "messages[0].role"),
        ([{"role": "banana", "content": "Hi"}], "messages[0].role"),
        ([{"role": "function", "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "a"}}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "nope"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": 5}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a", "b": 1}], "messages[0].b"),
        ([{"role": "user", "content": "a", "refusal": "no"}], "messages[0].refusal"),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "a", "tool_call_id": "c"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "Hi"}] * 5000, "messages"),
    ],
)
async def test_bad_messages(messages: Any, param: str) -> None:
    assert error_of(await post(FakeEngine(), CHAT, messages=messages))["param"] == param


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "file:///etc/passwd", "data:image/png;base64,AAAA"])
async def test_images_are_refused(url: str) -> None:
    for image in ({"url": url}, url):
        content = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": image}]
        error = error_of(await post(FakeEngine(), CHAT, messages=[{"role": "user", "content": content}]))
        assert error["code"] == "unsupported_value" and "image_url" in error["message"]


async def test_what_the_template_says_is_told() -> None:
    class Strict(FakeEngine):
        async def encode_chat(self, messages: Any, options: Any = None) -> list[int]:
            raise InvalidRequestError("the chat template refused the messages: no system", param="messages")

    error = error_of(await post(Strict(), CHAT))
    assert (error["param"], error["message"]) == ("messages", "the chat template refused the messages: no system")


async def test_logprobs() -> None:
    engine = FakeEngine(default=Script("aé".encode()))
    content = (await chat(engine, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    best = [{"token": "A", "logprob": -1.0, "bytes": [65]}]
    assert content == [
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": best},
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": best},
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xA9], "top_logprobs": best},
    ]


@pytest.mark.parametrize(("fields", "number"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)])
async def test_number_of_alternatives(fields: dict[str, int], number: int) -> None:
    content = (await chat(FakeEngine(), logprobs=True, **fields))["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [number] * 5


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"functions": []}, "unsupported_value", "functions"),
        ({"modalities": ["text", "audio"]}, "unsupported_value", "modalities"),
        ({"reasoning_effort": "low"}, "unsupported_value", "reasoning_effort"),
    ],
)
async def test_fields_that_nothing_is_made_of_are_refused(fields: dict[str, Any], code: str | None, param: str) -> None:
    error = error_of(await post(FakeEngine(), CHAT, **fields))
    assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"modalities": ["text"], "store": False, "service_tier": "default", "user": "me"},
    ],
)
async def test_values_that_ask_for_nothing_are_fine(fields: dict[str, Any]) -> None:
    await chat(FakeEngine(), **fields)
