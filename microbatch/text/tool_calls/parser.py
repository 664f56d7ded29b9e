"""What every parser shares: text that is not understood yet, and the step that is to be taken next."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from microbatch.text.tool_calls.events import Arguments, CallBegins, Event, append

Step = Callable[[], bool]


class ToolParser(ABC):
    """Reads one answer piece by piece. The events joined do not depend on where the pieces are cut.

    A call is begun when its name is certain, and its arguments follow as they come, so arguments that break off are
    told as far as they went. What begins like a call and is none comes out as it was written, as content. ``names``:
    the tools that the model was told of; ``make_id``: gives the ids of calls.
    """

    #: Special tokens that are markers of this form: the detokenizer has to show them.
    special: ClassVar[tuple[str, ...]] = ()
    #: Whether answers need this parser even when no tools were offered.
    always: ClassVar[bool] = False

    def __init__(self, names: Collection[str] = (), make_id: Callable[[], str] | None = None) -> None:
        self._names = frozenset(names)
        self._make_id = make_id or self.new_id
        self._text = ""
        self._events: list[Event] = []
        self._calls = 0
        self._ended = False
        self._step: Step = self._first

    def push(self, text: str) -> list[Event]:
        """What is certain after this text."""
        self._text += text
        return self._run()

    def finish(self) -> list[Event]:
        """The rest: the answer ends here."""
        self._ended = True
        return self._run()

    @staticmethod
    def new_id() -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def _first(self) -> bool:
        """The first step. A step reads from the front of the text, may name the next one, and returns whether there is
        more to do before more text comes."""

    def _run(self) -> list[Event]:
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _begin(self, name: str, call_id: str = "") -> None:
        self._events.append(CallBegins(self._calls, call_id or self._make_id(), name))
        self._calls += 1

    def _argue(self, text: str) -> None:
        if text:
            append(self._events, Arguments(self._calls - 1, text))
