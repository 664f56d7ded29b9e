"""Tools in chat requests: what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.support import CHAT, error_of, post
from tests.api.test_tools import NAMED, WEATHER, F

pytestmark = pytest.mark.anyio


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [F] * 129}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": [{**F, "x": 1}]}, "tools[0]"),
        ({"tools": function(x=1)}, "tools[0].function"),
        ({"tools": function(name="")}, "tools[0].function.name"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="a" * 65)}, "tools[0].function.name"),
        ({"tools": function(name=None)}, "tools[0].function.name"),
        ({"tools": [WEATHER, F, F]}, "tools[2].function.name"),
        ({"tools": function(description=5)}, "tools[0].function.description"),
        ({"tools": function(strict="yes")}, "tools[0].function.strict"),
        ({"tools": function(parameters=5)}, "tools[0].function.parameters"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters.type"),
        ({"tools": function(parameters={"properties": []})}, "tools[0].function.parameters.properties"),
        ({"tools": function(parameters={"required": "a"})}, "tools[0].function.parameters.required"),
        ({"tools": function(parameters={"required": [1]})}, "tools[0].function.parameters.required"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [F], "tool_choice": "banana"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {**NAMED, "x": 1}}, "tool_choice"),
        (
            {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
            "tool_choice.function",
        ),
        ({"tools": [F], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
async def test_bad_tools(fields: dict[str, Any], param: str) -> None:
    error = error_of(await post(FakeEngine(), CHAT, **fields))
    assert error["param"] == param and error["code"] in (None, "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "c"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
async def test_what_is_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    error = error_of(await post(FakeEngine(), CHAT, **fields))
    assert (error["code"], error["param"]) == ("unsupported_value", param)


@pytest.mark.parametrize("field", ["tools", "tool_choice", "chat_template_kwargs"])
async def test_a_key_given_twice_is_refused(field: str) -> None:
    value = {"tools": f'[{json.dumps(F)[:-1]}, "type": "function"}}]'}.get(field, '{"a": 1, "a": 2}')
    content = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "{field}": {value}}}'
    assert "twice" in error_of(await post(FakeEngine(), CHAT, content=content))["message"]
