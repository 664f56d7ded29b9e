"""Chunks in which nothing but a text changes, rendered once and filled in from then on."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

_encode = msgspec.json.Encoder().encode


class Frame:
    """``make(text)`` gives the JSON of a chunk; it is called once, with a text that stands for all others."""

    __slots__ = ("_before", "_after")

    def __init__(self, make: Callable[[str], msgspec.Raw]) -> None:
        mark = secrets.token_hex(16)  # by chance, so that no client can have put it into a name
        before, after = bytes(make(mark)).split(_encode(mark))
        self._before, self._after = before, after

    def fill(self, text: str) -> msgspec.Raw:
        """The chunk with this text; the same bytes as ``make`` would give."""
        return msgspec.Raw(b"%b%b%b" % (self._before, _encode(text), self._after))
