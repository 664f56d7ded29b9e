"""A tokenizer whose tokens are bytes: no files, no libraries. For tests, fakes and the simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from microbatch.core.chat import ChatOptions
from microbatch.errors import InvalidRequestError, UnsupportedError
from microbatch.text.detokenizer import IncrementalDetokenizer
from microbatch.text.joining import ByteJoiner, Pieces

BOS_TOKEN_ID: Final = 256
EOS_TOKEN_ID: Final = 257
VOCAB_SIZE: Final = 258


class ByteTokenizer:
    """A ``core.ports.Tokenizer``: ids 0 to 255 are bytes, 256 begins a text (when ``add_bos``), 257 ends it.

    A conversation is rendered as lines of ``role: content`` and ends with ``assistant:``; a first line has the tools.
    """

    def __init__(self, *, add_bos: bool = False, tool_parser: str = "hermes") -> None:
        self._tool_parser = tool_parser
        self._prefix = [BOS_TOKEN_ID] if add_bos else []

    @property
    def vocab_size(self) -> int:
        """258."""
        return VOCAB_SIZE

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The one end token, 257."""
        return frozenset({EOS_TOKEN_ID})

    @property
    def tool_parser(self) -> str:
        """As given."""
        return self._tool_parser

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The UTF-8 bytes of a text. Raises ``InvalidRequestError`` when it holds half of a surrogate pair."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode at character {error.start}") from error
        return [*self._prefix, *data] if add_special_tokens else list(data)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the bytes among the ids; broken ones become U+FFFD."""
        if not skip_special_tokens:
            return b"".join([self.token_text(i)[1] for i in token_ids]).decode("utf-8", "replace")
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One byte as text (U+FFFD unless it is ASCII) and as itself; a name for the special ids."""
        data = {BOS_TOKEN_ID: b"<bos>", EOS_TOKEN_ID: b"<eos>"}.get(token_id) or bytes([token_id])
        return data.decode("utf-8", "replace"), data

    def apply_chat_template(
        self, messages: Sequence[dict[str, object]], options: ChatOptions = ChatOptions()
    ) -> list[int]:
        """Token ids of the rendered conversation."""
        if options.reasoning_effort is not None:
            raise UnsupportedError("there is no reasoning", param="reasoning_effort")
        lines = [f"tools: {json.dumps(options.tools)}\n"] if options.tools else []
        lines += [f"{message['role']}: {message['content']}\n" for message in messages]
        if options.continue_final_message:
            lines[-1] = lines[-1][:-1]
        elif options.add_generation_prompt:
            lines.append("assistant:")
        return self.encode("".join(lines) + options.answer_prefix)

    def detokenizer(
        self, stop: Sequence[str] = (), shown: Sequence[str] = (), *, whole: bool = False
    ) -> IncrementalDetokenizer:
        """A fresh detokenizer for one sequence; the special ids have no text."""
        return IncrementalDetokenizer(ByteJoiner(_PIECES), stop)


_PIECES: Final = Pieces(lambda token_id: bytes([token_id]) if token_id < 256 else b"")
