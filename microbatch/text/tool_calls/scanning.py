"""Where things end in text that is still growing: markers, and JSON objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

#: Outside strings: everything that can stand in JSON and is no bracket or quote.
_PLAIN: Final = re.compile(r"[\s:,0-9+\-.eEtrufalsn]*")
#: Inside a string: everything up to its end, escapes in pairs.
_STRING: Final = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Place of the earliest marker, and which it is; the length of the text and "" when there is none."""
    first = len(text), ""
    for marker in markers:
        place = text.find(marker)
        if 0 <= place < first[0]:
            first = place, marker
    return first


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of a text that a marker may go on from."""
    held = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0 and not marker.startswith(text[start:]):
            start = text.find(marker[0], start + 1)
        if start >= 0:
            held = max(held, len(text) - start)
    return held


class ObjectScanner:
    """Finds the end of a JSON object that comes in pieces.

    ``open_brackets``: how many it is in already. Only brackets, strings and characters that no JSON has are looked at.
    """

    def __init__(self, open_brackets: int = 0) -> None:
        self._depth = open_brackets
        self._in_string = False
        #: A character that no JSON has ended the object early.
        self.broken = False

    def scan(self, text: str, start: int = 0) -> tuple[int, bool]:
        """Read on from ``start``: how far the object goes, and whether it ends there. What was not read (a backslash
        whose character is missing) is to be given again."""
        position = start
        while position < len(text):
            if self._in_string:
                position = self._string(text, position)
                if self._in_string:
                    return position, False
            else:
                position = self._outside(text, position)
                if self.broken or self._depth == 0:
                    return position, True
        return position, False

    def _string(self, text: str, position: int) -> int:
        match = _STRING.match(text, position)
        assert match is not None
        self._in_string = match.end() == len(text) or text[match.end()] != '"'
        return match.end() + (not self._in_string)

    def _outside(self, text: str, position: int) -> int:
        match = _PLAIN.match(text, position)
        assert match is not None
        position = match.end()
        if position == len(text):
            return position
        character = text[position]
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        elif character == '"':
            self._in_string = True
        else:
            self.broken = True
            return position
        return position + 1
