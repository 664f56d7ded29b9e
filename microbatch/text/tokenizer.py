"""The tokenizer of a model, wrapped for the rest of microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from microbatch.core.chat import ChatOptions
from microbatch.errors import InvalidRequestError, SetupError
from microbatch.text.chat import check_template, render_chat, template_source
from microbatch.text.decoding import read_rules
from microbatch.text.detokenizer import IncrementalDetokenizer
from microbatch.text.joining import ByteJoiner, Joiner, Pieces, WindowJoiner
from microbatch.text.tool_calls.choosing import choose_parser


class HFTokenizer:
    """A ``core.ports.Tokenizer`` over a fast tokenizer of transformers.

    ``vocab_size`` is the number of embedding rows of the model, which may exceed the tokenizer's own. Safe to call from
    any thread: after construction nothing changes the underlying tokenizer (setting padding or truncation on it is
    what makes other threads fail with "Already borrowed"), so no lock is needed and a long encode holds up nobody.
    """

    def __init__(
        self,
        raw: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        chat_template: str | None = None,
        tool_parser: str = "auto",
    ) -> None:
        backend = getattr(raw, "backend_tokenizer", None)
        if backend is None:
            raise SetupError(
                f"the tokenizer ({type(raw).__name__}) has no fast version (tokenizer.json): not supported"
            )
        self._raw = raw
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._chat_template = chat_template
        self._rules = read_rules(backend.decoder.__getstate__() if backend.decoder is not None else None)
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        #: By the special tokens that are shown, of which requests choose only what a parser names.
        self._pieces: dict[frozenset[int], Pieces] = {}
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if chat_template is not None:
            check_template(raw, chat_template)
        self._tool_parser = choose_parser(template_source(raw, chat_template)) if tool_parser == "auto" else tool_parser

    @property
    def vocab_size(self) -> int:
        """Ids are from 0 to ``vocab_size`` - 1."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a sequence."""
        return self._eos_token_ids

    @property
    def tool_parser(self) -> str:
        """Name of the form in which the model writes calls of tools; "none" when it is not known."""
        return self._tool_parser

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ``InvalidRequestError`` when it holds half of a surrogate pair."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode at character {error.start}") from error
        # The batch form lets other threads run meanwhile, the single form does not.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, special tokens left out: what a detokenizer without stop texts gives. Or with their names,
        as the tokenizer itself decodes."""
        if not skip_special_tokens:
            text: str = self._raw.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text
        joiner = self._joiner()
        return "".join([joiner.push(token_id) for token_id in token_ids]) + joiner.finish()

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, as text and as bytes. A special token shows its name."""
        data = self._token_bytes(token_id)
        return data.decode("utf-8", "replace"), data

    def apply_chat_template(
        self, messages: Sequence[dict[str, object]], options: ChatOptions = ChatOptions()
    ) -> list[int]:
        """Token ids of a conversation, by default with the generation prompt; ``InvalidRequestError`` if the template
        refuses it.

        The template writes the special tokens itself, so none are added.
        """
        text = render_chat(self._raw, messages, self._chat_template, options, self.tool_parser)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(
        self, stop: Sequence[str] = (), shown: Sequence[str] = (), *, whole: bool = False
    ) -> IncrementalDetokenizer:
        """A fresh detokenizer for one sequence; ``shown`` names the special tokens that its text has, ``whole`` keeps
        the space at its beginning."""
        ids = frozenset(map(self._backend.token_to_id, shown))
        return IncrementalDetokenizer(self._joiner(self._special & ids, whole), stop)

    def _joiner(self, shown: frozenset[int] = frozenset(), whole: bool = False) -> Joiner:
        if self._rules is None:
            return WindowJoiner(partial(self._decode_raw, shown=shown))
        if shown not in self._pieces:
            self._pieces[shown] = Pieces(partial(self._shown_bytes, shown))
        if whole:
            return ByteJoiner(self._pieces[shown])
        first_bytes = partial(self._first_bytes, shown) if self._rules.marker else None
        return ByteJoiner(self._pieces[shown], first_bytes, self._rules.strip)

    def _shown_bytes(self, shown: frozenset[int], token_id: int) -> bytes:
        """Bytes of a token in a text; none of a special one that is not shown, or an id that only the embedding has."""
        return b"" if token_id in self._special and token_id not in shown else self._token_bytes(token_id)

    def _first_bytes(self, shown: frozenset[int], token_id: int) -> bytes | None:
        """Bytes of the first token in a text, which loses its marker; None for one that is not shown."""
        if token_id in self._special:
            return self._token_bytes(token_id) if token_id in shown else None
        token = self._backend.id_to_token(token_id)
        return None if token is None or self._rules is None else self._rules.token_bytes(token, first=True)

    def _token_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return token.encode("utf-8")
        if self._rules is None:
            return self._decode_raw([token_id]).encode("utf-8")
        return self._rules.token_bytes(token)

    def _decode_raw(self, token_ids: Sequence[int], shown: frozenset[int] = frozenset()) -> str:
        ids = [i for i in token_ids if i in shown or i not in self._special] if shown else list(token_ids)
        text: str = self._raw.decode(ids, skip_special_tokens=not shown, clean_up_tokenization_spaces=False)
        return text
