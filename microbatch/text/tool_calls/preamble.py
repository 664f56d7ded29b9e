"""Tools in a conversation whose chat template has no place for them: in the system prompt, in the form of Hermes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

_PREAMBLE: Final = """\
You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. You \
may call one or more functions to assist with the user query. Here are the available tools:
<tools>
{tools}
</tools>
For each function call return a JSON object with the function name and its arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def write_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """The conversation with everything about tools as plain text: the tools behind the system prompt, calls behind the
    content of the message that made them, results as messages of the user."""
    written: list[dict[str, object]] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        # Results of one turn are one message: many templates want user and assistant to alternate.
        written += [_results(group)] if is_result else [_with_calls(message) for message in group]
    return _with_tools(written, tools) if tools else written


def _with_tools(messages: list[dict[str, object]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    preamble = _PREAMBLE.format(tools="\n".join(_json(tool) for tool in tools))
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": preamble}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{preamble}"}, *messages[1:]]


def _with_calls(message: Mapping[str, Any]) -> dict[str, object]:
    calls = message.get("tool_calls") or ()
    parts = [message["content"]] if message["content"] else []
    parts += [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**plain, "content": "\n".join(parts)}


def _results(messages: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages]
    return {"role": "user", "content": "\n".join(results)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
