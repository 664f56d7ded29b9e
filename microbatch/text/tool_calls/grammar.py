"""What an answer may be when calls of tools are forced or strict: a grammar in Lark's form, for llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from microbatch.core.structured import StructuredOutput

#: A marker as a terminal: the token that it is, or else its text.
Terminal = Callable[[str], str]
#: A function of a request: ``name``, ``parameters``, ``strict``.
Function = Mapping[str, Any]

NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT: Final = r"TEXT: /(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Constraint:
    """``prefix`` is put behind the prompt, so the model goes on in a call that it has begun; then comes ``form``."""

    prefix: str
    form: StructuredOutput


def quoted(text: str) -> str:
    """A text as a terminal."""
    return json.dumps(text)


def force_calls(parser: str, functions: Sequence[Function], parallel: bool, terminal: Terminal = quoted) -> Constraint:
    """An answer of calls and nothing else: one, or with ``parallel`` any number of them."""
    form = _FORMS[parser]
    more = form.more(terminal) if parallel else ""
    start = f"start: {form.first} call{f' ({more} call)*' if more else ''} {form.last}"
    rules = [start, *_calls(form, functions, terminal, all_strict=True)]
    return Constraint(form.prefix, StructuredOutput("grammar", "\n".join(rules) + "\n"))


def keep_strict(parser: str, functions: Sequence[Function], terminal: Terminal = quoted) -> StructuredOutput:
    """Any text, but every call has the form of one, and those of strict functions have arguments by their schema."""
    form = _FORMS[parser]
    rules = [*form.free(terminal), *_calls(form, functions, terminal, all_strict=False)]
    return StructuredOutput("grammar", "\n".join(rules) + "\n")


def needs_constraint(functions: Sequence[Function]) -> bool:
    """Whether one of them is strict."""
    return any(function.get("strict") for function in functions)


@dataclass(frozen=True, slots=True)
class _Form:
    """``call`` gives what stands before and behind the arguments of a function; ``more`` what stands between calls,
    "" where an answer has but one; ``free`` the rules of an answer that may be text or calls."""

    prefix: str
    call: Callable[[str, Terminal], tuple[str, str]]
    more: Callable[[Terminal], str]
    free: Callable[[Terminal], list[str]]
    first: str = ""
    last: str = ""


def _calls(form: _Form, functions: Sequence[Function], terminal: Terminal, all_strict: bool) -> list[str]:
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    rules = [f"call: {names}"]
    for index, function in enumerate(functions):
        before, behind = form.call(function["name"], terminal)
        schema = (function.get("parameters") or NO_PARAMETERS) if all_strict or function.get("strict") else _ANY
        rules.append(f"call_{index}: {before} args_{index} {behind}")
        rules.append(f"args_{index}: %json {json.dumps(schema)}")
    return rules


_ANY: Final[Mapping[str, Any]] = {"type": "object"}


def _object(arguments: str, end: str = "") -> Callable[[str, Terminal], tuple[str, str]]:
    def call(name: str, terminal: Terminal) -> tuple[str, str]:
        return quoted(f'{{"name": "{name}", "{arguments}": '), quoted("}" + end)

    return call


def _free_hermes(terminal: Terminal) -> list[str]:
    return [
        r'start: (begin "\n"? call)* TAIL',
        r"begin[lazy]: /(?s:.*)<tool_call>/",
        r"TAIL: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/",
    ]


def _free_llama(terminal: Terminal) -> list[str]:
    return ['start: call ("; " call)* | TEXT', r"TEXT: /(\s*[^\s{](?s:.*))?/"]


def _free_mistral(terminal: Terminal) -> list[str]:
    return [f'start: TEXT ({terminal("[TOOL_CALLS]")} "[" call (", " call)* "]")?', _TEXT]


def _free_harmony(terminal: Terminal) -> list[str]:
    channel, message, start = (terminal(f"<|{name}|>") for name in ("channel", "message", "start"))
    return [
        "start: thought? (final | use)",
        f'thought: {channel} "analysis" {message} TEXT {terminal("<|end|>")} {start} "assistant"',
        f'final: {channel} "final" {message} TEXT',
        f'use: {channel} "commentary to=functions" call',
        _TEXT,
    ]


def _harmony_call(name: str, terminal: Terminal) -> tuple[str, str]:
    json_follows = f'{terminal("<|constrain|>")} "json" {terminal("<|message|>")}'
    return f'{quoted(f".{name} ")} {json_follows}', ""


_FORMS: Final[Mapping[str, _Form]] = {
    "hermes": _Form(
        prefix="<tool_call>\n",
        call=_object("arguments", "\n</tool_call>"),
        more=lambda terminal: quoted("\n<tool_call>\n"),
        free=_free_hermes,
    ),
    "llama": _Form(prefix="", call=_object("parameters"), more=lambda terminal: quoted("; "), free=_free_llama),
    "mistral": _Form(
        prefix="[TOOL_CALLS]",
        call=_object("arguments"),
        more=lambda terminal: quoted(", "),
        free=_free_mistral,
        first=quoted("["),
        last=quoted("]"),
    ),
    "harmony": _Form(
        prefix="<|channel|>commentary to=functions",
        call=_harmony_call,
        more=lambda terminal: "",
        free=_free_harmony,
    ),
}
