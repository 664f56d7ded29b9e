"""How tokens join to text, one at a time: as bytes where the tokenizer allows it, else by decoding a window."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

#: A window that still ends in U+FFFD after so many tokens does not wait for the rest of a character.
MAX_WINDOW: Final = 16


class Joiner(Protocol):
    """Text of the tokens of one sequence, append-only; an unfinished character is held back."""

    def push(self, token_id: int) -> str:
        """New text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back; bytes of an unfinished character become U+FFFD."""
        ...


class ByteJoiner:
    """Joins the bytes of tokens and decodes them as UTF-8. Constant work per token, exact for any sequence of bytes.

    ``token_bytes(token_id, first)`` gives the bytes of a token, None for one that is not shown; ``first`` is true for
    the first one that is. Up to ``strip`` leading spaces of the text are dropped (sentencepiece).
    """

    def __init__(self, token_bytes: Callable[[int, bool], bytes | None], strip: int = 0) -> None:
        self._token_bytes = token_bytes
        self._strip = strip
        self._first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is complete after this token."""
        piece = self._token_bytes(token_id, self._first)
        if piece is None:
            return ""
        self._first = False
        return self._stripped(self._decoder.decode(piece))

    def finish(self) -> str:
        """One U+FFFD for the bytes of an unfinished character, if there are any."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text


class WindowJoiner:
    """Decodes the last tokens again with each new one: for decoders whose pieces depend on their neighbours.

    ``decode`` leaves special tokens out. The window is the last piece given out and what came after it, so the work per
    token is bounded by ``MAX_WINDOW``.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._given: list[int] = []
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is complete after this token."""
        self._new.append(token_id)
        text = self._fresh()
        full = len(self._new) >= MAX_WINDOW
        if not text and full:
            self._new.clear()  # tokens without any text, such as special ones
        if not text or (text.endswith("\ufffd") and not full):
            return ""
        self._given, self._new = self._new, []
        return text

    def finish(self) -> str:
        """Text of the tokens that were held back."""
        text, self._new = self._fresh(), []
        return text

    def _fresh(self) -> str:
        return self._decode(self._given + self._new)[len(self._decode(self._given)) :]
