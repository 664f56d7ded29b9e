"""Stop texts: cut the text before the earliest one, and never give out any part of it."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopFilter:
    """Passes text through until a stop text begins.

    The earliest match in the text wins, wherever token edges fall: the text given out is ``T[:min(T.index(s))]``. Text
    that may be the beginning of a stop is held back. Text in which no stop begins passes after one search for their
    first characters; from there each character costs a few steps per stop (Knuth-Morris-Pratt), so no choice of stop
    texts makes a token expensive.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        first = re.escape("".join(stop[:1] for stop in self._stops))
        self._begins = re.compile(f"[{first}]").search if first else None
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._cut: int | None = None
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found; nothing more comes out then."""
        return self._stopped

    def push(self, text: str) -> str:
        """Take new text, give out what is certain."""
        if self._stopped:
            return ""
        if self._held:
            return self._follow(text)
        found = self._begins(text) if self._begins is not None else None
        if found is None:
            return text
        begin = found.start()
        return text[:begin] + self._follow(text[begin:])

    def finish(self) -> str:
        """The text ends here: the rest of it, up to a stop text that still waited for an earlier one to fail."""
        if self._stopped:
            return ""
        if self._cut is not None:
            return self._stop()
        return self._give(len(self._held))

    def _follow(self, text: str) -> str:
        """As ``push``, for text that a stop may begin in or go on in."""
        seen = len(self._held)
        self._held += text
        for character in text:
            seen += 1
            self._advance(character, seen)
            if self._cut is not None and self._cut <= seen - max(self._matched):
                return self._stop()
        return self._give(seen - max(self._matched))

    def _advance(self, character: str, seen: int) -> None:
        for index, stop in enumerate(self._stops):
            matched, borders = self._matched[index], self._borders[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                start = seen - matched
                self._cut = start if self._cut is None else min(self._cut, start)
                matched = borders[matched - 1]
            self._matched[index] = matched

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        if self._cut is not None:
            self._cut -= length
        return given

    def _stop(self) -> str:
        given, self._held = self._held[: self._cut], ""
        self._stopped = True
        return given


def _borders(text: str) -> tuple[int, ...]:
    """For each prefix of a text, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return tuple(borders)
