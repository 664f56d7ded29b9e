"""What a parser finds in an answer, in the order in which it was written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool; its arguments follow. Calls of one answer are counted from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of a call, JSON as the model wrote it."""

    index: int
    text: str


Event = Content | Reasoning | CallBegins | Arguments


def append(events: list[Event], event: Event) -> None:
    """Add an event; text that goes on where the last one ended is joined with it."""
    last = events[-1] if events else None
    if isinstance(event, Content) and isinstance(last, Content):
        events[-1] = Content(last.text + event.text)
    elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
        events[-1] = Reasoning(last.text + event.text)
    elif isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
        events[-1] = Arguments(last.index, last.text + event.text)
    else:
        events.append(event)
