"""How tokens join to text, one at a time: as bytes where the tokenizer allows it, else by decoding a window."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
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


class Pieces(dict[int, "str | bytes"]):
    """What each token adds to a text, made when it is first asked for and kept for every sequence of a tokenizer: text
    when its bytes are whole characters, as they nearly always are, else the bytes; empty for a token that is not
    shown."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._token_bytes(token_id)
        try:
            piece: str | bytes = data.decode("utf-8")
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece


class ByteJoiner:
    """Joins the bytes of tokens and decodes them as UTF-8. Constant work per token, exact for any sequence of bytes.

    ``first_bytes`` gives the bytes of the first token that is shown, and None for one that is not, where they differ
    from its piece; up to ``strip`` leading spaces of the text are dropped (both sentencepiece).
    """

    def __init__(
        self,
        pieces: Mapping[int, str | bytes],
        first_bytes: Callable[[int], bytes | None] | None = None,
        strip: int = 0,
    ) -> None:
        self._pieces = pieces
        self._first_bytes = first_bytes
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        #: Nothing is held back and the text has begun, so that a piece of whole characters passes as it is.
        self._plain = first_bytes is None and not strip

    def push(self, token_id: int) -> str:
        """Text that is complete after this token."""
        piece = self._pieces[token_id]
        if self._plain and isinstance(piece, str):
            return piece
        return self._join(token_id, piece)

    def finish(self) -> str:
        """One U+FFFD for the bytes of an unfinished character, if there are any."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _join(self, token_id: int, piece: str | bytes) -> str:
        data = piece.encode("utf-8") if isinstance(piece, str) else piece
        if self._first_bytes is not None:
            first = self._first_bytes(token_id)
            if first is None:
                return ""
            data, self._first_bytes = first, None
        text = self._stripped(self._decoder.decode(data))
        self._plain = not self._strip and not self._decoder.getstate()[0]
        return text

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
        self._given_length = 0

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
        self._given_length = len(self._decode(self._given))
        return text

    def finish(self) -> str:
        """Text of the tokens that were held back."""
        text, self._new = self._fresh(), []
        return text

    def _fresh(self) -> str:
        return self._decode(self._given + self._new)[self._given_length :]
