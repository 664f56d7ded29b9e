"""Answers that are plain text up to a marker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from microbatch.text.tool_calls.events import Content, Event, append
from microbatch.text.tool_calls.parser import ToolParser
from microbatch.text.tool_calls.scanning import find_first, held_length


class MarkedParser(ToolParser):
    """White space beside a call belongs to nobody and is dropped; without a call the text is left as it is."""

    #: What begins a call in the middle of text.
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str] = (), make_id: Callable[[], str] | None = None) -> None:
        super().__init__(names, make_id)
        self._space = ""

    def finish(self) -> list[Event]:
        """The rest: the answer ends here."""
        events = super().finish()
        if self._space and not self._calls:
            append(events, Content(self._space))
        self._space = ""
        return events

    def _first(self) -> bool:
        self._step = self._content
        return True

    def _content(self) -> bool:
        place, marker = find_first(self._text, self.markers)
        if not marker and not self._ended:
            place -= held_length(self._text, self.markers)
        self._write(self._take(place))
        if marker:
            self._step = self._marked
        return bool(marker)

    @abstractmethod
    def _marked(self) -> bool:
        """The text begins with a marker."""

    def _refuse(self, length: int) -> bool:
        """The first ``length`` characters are no call after all."""
        self._write(self._take(length))
        self._step = self._content
        return True

    def _wait(self) -> bool:
        """More text may decide; at the end of the answer there is no call."""
        return self._refuse(len(self._text)) if self._ended else False

    def _write(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            append(self._events, Content(kept))

    def _begin(self, name: str, call_id: str = "") -> None:
        self._space = ""
        super()._begin(name, call_id)
