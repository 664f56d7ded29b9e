"""The tools of a request: checked in full, and what of them the answer may use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from microbatch.api.errors import quote
from microbatch.api.openai.schema import ChatRequest
from microbatch.errors import InvalidRequestError, UnsupportedError

Tool = Mapping[str, Any]

_NAME: Final = re.compile("[A-Za-z0-9_-]{1,64}")
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
#: Kinds of tools that the API knows and this server has not.
_OTHER_KINDS: Final = (
    *("custom", "web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview"),
    *("image_generation", "local_shell", "mcp"),
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools`` are told to the model, ``functions`` may be called: one of them at least when ``forced``, at most one
    unless ``parallel``."""

    tools: tuple[Tool, ...] = ()
    functions: tuple[Mapping[str, Any], ...] = ()
    forced: bool = False
    parallel: bool = True


def read_tools(body: ChatRequest) -> ToolUse:
    """What the request says of tools. Without a ``tool_choice`` it is auto; with none the model is told of no tools.

    Raises ``InvalidRequestError`` for a malformed value, ``UnsupportedError`` for one that this server does not have.
    """
    functions = _read_functions(body.tools or ())
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequestError(
            f"tool_choice must be 'none', 'auto', 'required' or a function, got {quote(choice)}", param="tool_choice"
        )
    if choice not in (None, "none", "auto") and not functions:
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    if choice == "none" or not functions:
        return ToolUse()
    tools = tuple(body.tools or ())
    if isinstance(choice, dict):
        return ToolUse(tools, (_chosen(choice, functions),), forced=True, parallel=False)
    return ToolUse(tools, functions, forced=choice == "required", parallel=parallel)


def _read_functions(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = _function(tool, where)
        if function["name"] in functions:
            raise _error(f"{where}.function.name", f"two functions have the name {quote(function['name'])}")
        functions[function["name"]] = function
    return tuple(functions.values())


def _function(tool: Tool, where: str) -> Mapping[str, Any]:
    kind = tool.get("type")
    if isinstance(kind, str) and kind in _OTHER_KINDS:
        raise UnsupportedError(f"{where}: this server has no tools of type {kind}", param=f"{where}.type")
    if kind != "function":
        raise _error(f"{where}.type", "must be 'function'")
    _check_fields(tool, ("type", "function"), where)
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise _error(where, "must be an object with a name")
    _check_fields(function, _FUNCTION_FIELDS, where)
    _check_function(function, where)
    return function


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _error(f"{where}.name", "must be 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(function.get("description") or "", str):
        raise _error(f"{where}.description", "must be a text")
    if not isinstance(function.get("strict") or False, bool):
        raise _error(f"{where}.strict", "must be true or false")
    if function.get("parameters") is not None:
        _check_parameters(function["parameters"], f"{where}.parameters")


def _check_parameters(schema: object, where: str) -> None:
    """A JSON Schema of an object, as far as any reader of it relies on."""
    if not isinstance(schema, dict):
        raise _error(where, "must be an object")
    if schema.get("type", "object") != "object":
        raise _error(f"{where}.type", "must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise _error(f"{where}.properties", "must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _error(f"{where}.required", "must be a list of texts")


def _chosen(choice: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    kind = choice.get("type")
    if not isinstance(kind, str):
        raise _error("tool_choice", "must have a type")
    if kind == "allowed_tools" or kind in _OTHER_KINDS:
        raise UnsupportedError(f"tool_choice of type {kind} is not supported by this server", param="tool_choice")
    _check_fields(choice, ("type", "function"), "tool_choice")
    named = choice.get("function")
    if kind != "function" or not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise _error("tool_choice", "must be of type 'function' with the name of one")
    _check_fields(named, ("name",), "tool_choice.function")
    for function in functions:
        if function["name"] == named["name"]:
            return function
    raise _error("tool_choice", f"there is no function {quote(named['name'])} among the tools")


def _check_fields(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in value:
        if name not in known and value[name] is not None:
            raise InvalidRequestError(f"{where}: unknown field {quote(name)}", param=where, code="unknown_parameter")


def _error(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}" if what.startswith("must") else f"{where}: {what}", param=where)
