"""Answers read at once and in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from microbatch.text.tool_calls.choosing import PARSERS
from microbatch.text.tool_calls.events import Arguments, CallBegins, Content, Event, Reasoning, append
from microbatch.text.tool_calls.parser import ToolParser

NAMES = ("get_weather", "f")


def counted() -> Callable[[], str]:
    """Ids c0, c1 and so on."""
    numbers = itertools.count()
    return lambda: f"c{next(numbers)}"


def make(name: str, names: Sequence[str] = NAMES) -> ToolParser:
    return PARSERS[name](names, counted())


def read(name: str, pieces: Sequence[str], names: Sequence[str] = NAMES) -> list[Event]:
    """The events of an answer that comes in these pieces, joined."""
    parser = make(name, names)
    events: list[Event] = []
    for found in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        for event in found:
            append(events, event)
    return events


def told(name: str, text: str, names: Sequence[str] = NAMES) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls as (name, arguments), and reasoning of an answer."""
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for event in read(name, [text], names):
        match event:
            case Content(more):
                content += more
            case Reasoning(more):
                reasoning += more
            case CallBegins(index, _, called):
                assert index == len(calls)
                calls.append((called, ""))
            case Arguments(index, more):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + more)
    return content, calls, reasoning
