"""Tools with the embedded model: a forced call keeps to its schema whatever the model would rather say."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from microbatch.api.app import create_app
from microbatch.wiring import Engine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]
MESSAGES = [{"role": "user", "content": "Tell me a joke."}]


@pytest.mark.parametrize("policy", ["window", "continuous"])
async def test_forced_calls(policy: str, embedded_model: Path) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with Engine(str(embedded_model), policy=policy) as engine:
        transport = httpx2.ASGITransport(app=create_app(engine))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=100) as client:
            for choice in ("required", named):
                body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 1, "max_tokens": 200}
                answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
                if answer["finish_reason"] == "length":  # white space and texts may be long, but are of the form
                    continue
                assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
                for call in answer["message"]["tool_calls"]:
                    arguments = json.loads(call["function"]["arguments"])
                    if call["function"]["name"] == "get_weather":
                        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F")
                    else:
                        assert (call["function"]["name"], arguments) == ("get_time", {}) and choice == "required"
