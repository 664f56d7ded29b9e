"""Tokenizers as llguidance wants them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from microbatch.core.ports import Tokenizer
from microbatch.errors import InvalidRequestError


def of_transformers(raw: Any, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """From a fast tokenizer of transformers; ``vocab_size`` counts the rows of the model's embedding."""
    from llguidance import hf

    try:
        return hf.from_tokenizer(raw, n_vocab=vocab_size, eos_token=_eos(eos_token_ids))
    except Exception as error:  # of many kinds, by what the tokenizer lacks
        raise InvalidRequestError(f"answers of this model cannot be held to a form: {error}") from error


def of_tokens(tokenizer: Tokenizer) -> LLTokenizer:
    """From any tokenizer, token by token; for small vocabularies."""
    return LLTokenizer(TokenizerWrapper(_Listed(tokenizer)), eos_token=_eos(tokenizer.eos_token_ids))


class _Listed:
    """What ``TokenizerWrapper`` reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = _eos(tokenizer.eos_token_ids)[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_text(i)[1] for i in range(tokenizer.vocab_size)]
        shown = [bool(tokenizer.decode([i])) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, is_shown in enumerate(shown) if not is_shown]

    def __call__(self, text: bytes | str) -> Sequence[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False)


def _eos(eos_token_ids: Collection[int]) -> list[int]:
    if not eos_token_ids:
        raise InvalidRequestError("answers of a model without an end token cannot be held to a form")
    return sorted(eos_token_ids)
