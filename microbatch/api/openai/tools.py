"""Tools and response formats: checked in full, and refused by name as long as they are not implemented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from microbatch.api.errors import quote
from microbatch.api.openai.schema import ChatRequest
from microbatch.errors import InvalidRequestError, UnsupportedError


def refuse_tools_and_formats(body: ChatRequest) -> None:
    """Raise ``InvalidRequestError`` for a malformed value, ``UnsupportedError`` for one that asks for something."""
    if body.tools is not None:
        _check_tools(body.tools)
    _check_choice(body.tool_choice, body.tools)
    if body.response_format is not None:
        _check_format(body.response_format)
    if body.tools is not None:
        raise UnsupportedError("tools are not supported by this server", param="tools")


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise InvalidRequestError(f"{where}.type must be 'function'", param=f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"{where}.function must have a name", param=f"{where}.function")
        if not isinstance(function.get("parameters") or {}, dict):
            raise InvalidRequestError(f"{where}.function.parameters must be an object", param=f"{where}.function")


def _check_choice(choice: str | Mapping[str, Any] | None, tools: object) -> None:
    if choice is None or choice == "none" or choice == "auto":
        return
    if isinstance(choice, str) and choice != "required":
        raise InvalidRequestError(
            f"tool_choice must be 'none', 'auto', 'required' or a function, got {quote(choice)}", param="tool_choice"
        )
    if tools is None:
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, dict) and not isinstance(choice.get("type"), str):
        raise InvalidRequestError("tool_choice must have a type", param="tool_choice")
    raise UnsupportedError("tool_choice is not supported by this server", param="tool_choice")


def _check_format(response_format: Mapping[str, Any]) -> None:
    kind = response_format.get("type")
    if kind == "text":
        return
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            raise InvalidRequestError("response_format.json_schema must have a name", param="response_format")
        if not isinstance(schema.get("schema"), dict):
            raise InvalidRequestError("response_format.json_schema.schema must be an object", param="response_format")
    elif kind != "json_object":
        raise InvalidRequestError(
            f"response_format.type must be 'text', 'json_object' or 'json_schema', got {quote(str(kind))}",
            param="response_format",
        )
    raise UnsupportedError(f"response_format {kind} is not supported by this server", param="response_format")
