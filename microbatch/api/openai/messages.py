"""The messages of a conversation, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from microbatch.api.errors import quote
from microbatch.api.openai.schema import ChatMessage, ToolCall
from microbatch.errors import InvalidRequestError, UnsupportedError

#: Roles of the API and the role the template sees.
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
#: Kinds of parts that the API knows and a text model cannot read.
OTHER_PARTS: Final = ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url")


def read_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Role, text and tool calls of every message; parts of text are joined without anything between them.

    Raises ``InvalidRequestError`` with the place as ``param``.
    """
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: ChatMessage, where: str) -> dict[str, object]:
    if message.role not in ROLES:
        raise InvalidRequestError(f"{where}.role: unknown role {quote(message.role)}", param=f"{where}.role")
    _check_fields(message, where)
    result: dict[str, object] = {"role": ROLES[message.role], "content": _read_content(message, f"{where}.content")}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if thoughts := message.reasoning_content or message.reasoning:
        result["reasoning_content"] = thoughts
    if message.tool_calls:
        result["tool_calls"] = [_read_call(call) for call in message.tool_calls]
    return result


def _check_fields(message: ChatMessage, where: str) -> None:
    if message.tool_calls is not None and message.role != "assistant":
        raise InvalidRequestError(f"{where}.tool_calls: only an assistant calls tools", param=f"{where}.tool_calls")
    if (message.reasoning or message.reasoning_content) and message.role != "assistant":
        raise InvalidRequestError(f"{where}.reasoning: only an assistant has it", param=f"{where}.reasoning")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise InvalidRequestError(
            f"{where}.tool_call_id: a message of a tool has it, and no other", param=f"{where}.tool_call_id"
        )


def _read_content(message: ChatMessage, where: str) -> str:
    if message.content is None:
        if message.tool_calls or message.reasoning or message.reasoning_content:
            return ""
        raise InvalidRequestError(f"{where} is missing", param=where)
    if isinstance(message.content, str):
        return message.content
    return "".join([_read_part(part, f"{where}[{index}]") for index, part in enumerate(message.content)])


def _read_part(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if isinstance(kind, str) and kind in OTHER_PARTS:
        raise UnsupportedError(f"{where}: this server reads text only, not parts of type {kind}", param=where)
    if kind != "text":
        raise InvalidRequestError(f"{where}.type must be 'text', got {quote(str(kind))}", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a text", param=f"{where}.text")
    for name, value in part.items():
        if name not in ("type", "text") and value is not None:
            raise InvalidRequestError(f"{where}: unknown field {quote(name)}", param=where, code="unknown_parameter")
    return text


def _read_call(call: ToolCall) -> dict[str, object]:
    """Templates take arguments as an object; text that is not one is passed on as it is."""
    arguments: object = call.function.arguments
    try:
        parsed = json.loads(call.function.arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    except (ValueError, RecursionError):
        pass
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
