"""How a conversation is rendered, as far as a request says: continued messages, variables, effort."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.support import CHAT, error_of, post

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "He"}


async def prompt(**fields: Any) -> str:
    engine = FakeEngine()
    response = await post(engine, CHAT, **fields)
    assert response.status_code == 200, response.text
    return bytes(engine.requests[0].prompt_token_ids).decode()


async def test_the_generation_prompt() -> None:
    assert await prompt() == await prompt(add_generation_prompt=True) == "user: Hi\nassistant:"
    assert await prompt(add_generation_prompt=False) == "user: Hi\n"


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
async def test_the_last_message_goes_on(fields: dict[str, Any]) -> None:
    assert await prompt(messages=[USER, BEGUN], continue_final_message=True, **fields) == "user: Hi\nassistant: He"


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, BEGUN], "add_generation_prompt": True},
        {"messages": [USER]},
        {"messages": [USER, {**BEGUN, "tool_calls": [CALL]}]},
        {
            "messages": [USER, BEGUN],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        },
    ],
)
async def test_what_cannot_go_on(fields: dict[str, Any]) -> None:
    error = error_of(await post(FakeEngine(), CHAT, continue_final_message=True, **fields))
    assert error["param"] == "continue_final_message"


async def test_variables_are_passed_on() -> None:
    engine = FakeEngine()
    assert (await post(engine, CHAT, chat_template_kwargs={"a": [1]})).status_code == 200
    assert engine.options.variables == {"a": [1]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"documents": [{"text": "a"}]}, "unsupported_value", "documents"),
        ({"chat_template": "x"}, "unsupported_value", "chat_template"),
        ({"chat_template_kwargs": 5}, None, "chat_template_kwargs"),
        ({"reasoning_effort": "huge"}, None, "reasoning_effort"),
        ({"reasoning_effort": "low"}, "unsupported_value", "reasoning_effort"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            None,
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"add_generation_prompt": "no"}, None, "add_generation_prompt"),
        ({"messages": [{**USER, "reasoning": "x"}]}, None, "messages[0].reasoning"),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], code: str | None, param: str) -> None:
    error = error_of(await post(FakeEngine(), CHAT, **fields))
    assert (error["code"], error["param"]) == (code, param)
