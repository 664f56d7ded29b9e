"""The form of gpt-oss: messages with a channel and a recipient, between markers that are special tokens.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The library that OpenAI gives for it reads token ids of its own vocabulary and keeps 72 MiB for it; this parser reads
text like the others, and the tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from microbatch.text.tool_calls.events import Content, Reasoning, append
from microbatch.text.tool_calls.parser import ToolParser
from microbatch.text.tool_calls.scanning import find_first, held_length

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
#: A header has a role, a channel, a recipient and a format.
MAX_HEADER: Final = 512

_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,64})(?![^\s<])")


class HarmonyParser(ToolParser):
    """The channel final is content, calls of functions are calls, and the rest is reasoning."""

    special = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    always = True

    def __init__(self, names: Collection[str] = (), make_id: Callable[[], str] | None = None) -> None:
        super().__init__(names, make_id)
        self._channel = "final"
        self._argued = False

    def _first(self) -> bool:
        """The prompt ends within a header: with what a header goes on, or else with text that has none."""
        for begin in (CHANNEL, MESSAGE, START, " to="):
            if self._text.startswith(begin):
                self._step = self._header
                return True
            if begin.startswith(self._text) and not self._ended:
                return False
        self._step = self._body
        return True

    def _header(self) -> bool:
        place = self._text.find(MESSAGE, 0, MAX_HEADER)
        if place >= 0:
            self._open(self._take(place + len(MESSAGE)))
        elif len(self._text) >= MAX_HEADER:  # nothing of the form: better shown than lost
            self._channel = "final"
        else:
            if self._ended:
                self._text = ""
            return False
        self._step = self._body
        return True

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        if recipient is None:
            return
        known = recipient[1] in self._names
        self._channel, self._argued = "call" if known else "final", False
        if known:
            self._begin(recipient[1])

    def _body(self) -> bool:
        place, marker = find_first(self._text, (*ENDS, START))
        if not marker and not self._ended:
            place -= held_length(self._text, (*ENDS, START))
        self._tell(self._take(place))
        if marker or self._ended:
            self._close()
        if marker:
            self._take(len(marker))
            self._step = self._header
        return bool(marker)

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._channel == "call":
            self._argued = True
            self._argue(text)
        else:
            append(self._events, Content(text) if self._channel == "final" else Reasoning(text))

    def _close(self) -> None:
        """A call without arguments has an empty object of them."""
        if self._channel == "call" and not self._argued:
            self._argue("{}")
        self._channel = "final"
