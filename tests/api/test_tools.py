"""Tools in chat requests: what the model is told, and how calls are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microbatch.core.structured import StructuredOutput
from microbatch.text.bytes_tokenizer import ByteTokenizer
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import CHAT, error_of, events, post

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
F = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def engine_of(text: str, parser: str = "hermes", **script: Any) -> FakeEngine:
    return FakeEngine(default=Script(text.encode(), **script), tokenizer=ByteTokenizer(tool_parser=parser))


async def answered(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, CHAT, **{"tools": [WEATHER, F], **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def streamed(engine: FakeEngine, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A stream put together as clients do it, and its chunks' choices."""
    response = await post(engine, CHAT, stream=True, **{"tools": [WEATHER, F], **fields})
    choices = [chunk["choices"][0] for chunk in events(response)]
    message: dict[str, Any] = {"refusal": None}
    for delta in [choice["delta"] for choice in choices]:
        for name, value in delta.items():
            if name == "tool_calls":
                _join_calls(message.setdefault("tool_calls", []), value)
            elif isinstance(message.get(name), str):
                message[name] += value
            else:
                message[name] = value
    return message, choices


def _join_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        if piece["index"] == len(calls):
            assert set(piece) == {"index", "id", "type", "function"} and piece["function"]["arguments"] == ""
            calls.append({name: value for name, value in piece.items() if name != "index"})
        else:
            assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    bare: dict[str, Any] = json.loads(
        json.dumps(message), object_hook=lambda d: {k: v for k, v in d.items() if k != "id"}
    )
    return bare


async def test_a_call() -> None:
    choice = await answered(engine_of(CALL))
    (call,) = choice["message"].pop("tool_calls")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None},
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}


ANSWERS = {
    "text": "Hello \n",
    "nothing": "",
    "call": CALL,
    "calls behind text": f"I look.\n{CALL}\n{OTHER}",
    "no call": "a <tool_call>oops</tool_call> b",
    "broken off": CALL[:50],
    "broken off early": CALL[:15],
}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=list(ANSWERS))
@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}, {"logprobs": True}], ids=str)
async def test_a_stream_is_the_answer(text: str, fields: dict[str, Any]) -> None:
    whole = await answered(engine_of(text), **fields)
    message, choices = await streamed(engine_of(text), **fields)
    assert without_ids(message) == without_ids(whole["message"])
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == whole["finish_reason"]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all("role" not in choice["delta"] for choice in choices[1:])
    if fields.get("logprobs") and text:
        told = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
        assert told == whole["logprobs"]["content"] and len(told) == len(text.encode())


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("text", "Hello \n", "stop"),
        ("nothing", "", "stop"),
        ("call", None, "tool_calls"),
        ("calls behind text", "I look.", "tool_calls"),
        ("no call", "a <tool_call>oops</tool_call> b", "stop"),
        ("broken off early", CALL[:15], "stop"),
    ],
)
async def test_content_and_reason(name: str, content: str | None, reason: str) -> None:
    choice = await answered(engine_of(ANSWERS[name]))
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)


async def test_a_call_that_the_length_cuts() -> None:
    choice = await answered(engine_of(CALL), max_tokens=60)
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == CALL[CALL.index('{"city"') : 60] == '{"city": "K'


async def test_parallel_calls_and_one_alone() -> None:
    both = await answered(engine_of(CALL + OTHER))
    assert [call["function"]["name"] for call in both["message"]["tool_calls"]] == ["get_weather", "f"]
    assert len({call["id"] for call in both["message"]["tool_calls"]}) == 2
    one = await answered(engine_of(CALL + OTHER), parallel_tool_calls=False)
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["get_weather"]


async def test_choices_have_calls_of_their_own() -> None:
    response = await post(engine_of(CALL), CHAT, tools=[WEATHER], n=2)
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in response.json()["choices"]}
    assert len(ids) == 2
    response = await post(engine_of(CALL), CHAT, tools=[WEATHER], n=2, stream=True)
    begun = [
        (chunk["choices"][0]["index"], call["index"])
        for chunk in events(response)
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert begun == [(0, 0), (1, 0)]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
async def test_without_tools_the_text_is_the_content(fields: dict[str, Any]) -> None:
    engine = engine_of(CALL)
    choice = await answered(engine, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert engine.options.tools == () and engine.requests[0].params.shown_tokens == ()


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
async def test_the_model_is_told_of_all_tools(choice: Any) -> None:
    engine = engine_of("")
    await answered(engine, tool_choice=choice)
    assert engine.options.tools == (WEATHER, F)
    assert engine.requests[0].params.shown_tokens == ("<tool_call>", "</tool_call>")


async def test_free_answers_are_not_constrained() -> None:
    engine = engine_of("")
    await answered(engine)
    assert engine.requests[0].params.structured_output is None and engine.options.answer_prefix == ""


FORCED = '{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": NAMED}])
async def test_a_forced_answer_is_held_to_a_grammar_behind_the_marker(fields: dict[str, Any]) -> None:
    engine = engine_of(FORCED)
    choice = await answered(engine, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'
    assert engine.options.answer_prefix == "<tool_call>\n"
    form = engine.requests[0].params.structured_output
    assert isinstance(form, StructuredOutput) and form.kind == "grammar"
    named = fields["tool_choice"] == NAMED
    assert ("get_weather" in form.text, "<tool_call>" in form.text) == (not named, not named)
    message, _ = await streamed(engine_of(FORCED), **fields)
    assert without_ids(message) == without_ids(choice["message"])


async def test_a_forced_answer_without_room_has_no_content() -> None:
    choice = await answered(engine_of(FORCED), tool_choice="required", max_tokens=4)
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    message, _ = await streamed(engine_of(FORCED), tool_choice="required", max_tokens=4)
    assert message == choice["message"]


async def test_one_forced_call_without_parallel() -> None:
    engine = engine_of(FORCED)
    await answered(engine, tool_choice="required", parallel_tool_calls=False)
    form = engine.requests[0].params.structured_output
    assert form is not None and "<tool_call>" not in form.text


async def test_strict_functions_constrain_a_free_answer() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    engine = engine_of("Hello")
    choice = await answered(engine, tools=[strict, F])
    assert choice["message"]["content"] == "Hello"
    form = engine.requests[0].params.structured_output
    assert form is not None and json.dumps(SCHEMA) in form.text and 'args_1: %json {"type": "object"}' in form.text


async def test_harmony_reads_channels_even_without_tools() -> None:
    text = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    for fields in ({"tools": None}, {}):
        choice = await answered(engine_of(text, "harmony"), **fields)
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hi",
            "refusal": None,
            "reasoning": "Think.",
            "reasoning_content": "Think.",
        }
        message, _ = await streamed(engine_of(text, "harmony"), **fields)
        assert message == choice["message"]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama", '{"name": "get_weather", "parameters": {"city": "Köln"}}'),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln"}'),
        (
            "harmony",
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln"}',
        ),
    ],
)
async def test_other_forms(parser: str, text: str) -> None:
    choice = await answered(engine_of(text, parser))
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    message, _ = await streamed(engine_of(text, parser))
    assert without_ids(message) == without_ids(choice["message"])


async def test_a_model_whose_form_is_not_known() -> None:
    error = error_of(await post(engine_of("", "none"), CHAT, tools=[F]))
    assert (error["code"], error["param"]) == ("unsupported_value", "tools") and "--tool-parser" in error["message"]
    assert (await answered(engine_of("Hi", "none"), tool_choice="none"))["message"]["content"] == "Hi"


async def test_an_answer_with_calls_can_be_sent_back() -> None:
    message = (await answered(engine_of(f"Hm.{CALL}")))["message"]
    engine = engine_of("Hi")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    await answered(engine, messages=[{"role": "user", "content": "Hi"}, {**message, "reasoning": "R"}, result])
    assert engine.messages[1]["reasoning_content"] == "R"
    assert engine.messages[1]["tool_calls"] == [
        {
            "id": message["tool_calls"][0]["id"],
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Köln"}},
        }
    ]
