"""Special tokens in a text: hidden, but for those that a request names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from microbatch.text.tokenizer import HFTokenizer
from tests.text.toy_tokenizers import (
    byte_level_backend,
    metaspace_backend,
    raw_tokenizer,
    sentencepiece_backend,
    wordpiece_backend,
)

MAKERS: list[tuple[Callable[[], Tokenizer], str, str]] = [
    (byte_level_backend, "<|im_start|>", "The capital"),
    (sentencepiece_backend, "<s>", "The capital"),
    (metaspace_backend, "</s>", "Hello world"),
    (wordpiece_backend, "[SEP]", "hello world"),
]


@pytest.mark.parametrize(("make", "name", "words"), MAKERS)
def test_only_what_is_named(make: Callable[[], Tokenizer], name: str, words: str) -> None:
    backend = make()
    tokenizer = HFTokenizer(raw_tokenizer(backend), 512, {1})
    special = sorted(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    assert backend.token_to_id(name) in special
    plain_ids = tokenizer.encode(words, add_special_tokens=False)
    for ids in ([*special, *plain_ids], [*plain_ids, *special], [*plain_ids[:1], *special, *plain_ids[1:]]):
        shown, hidden = tokenizer.detokenizer((), (name, "no such token")), tokenizer.detokenizer()
        plain = "".join([hidden.push(i) for i in ids]) + hidden.finish()
        text = "".join([shown.push(i) for i in ids]) + shown.finish()
        assert plain == tokenizer.decode(ids) and plain.split() == words.split()
        assert text.count(name) == 1 and text.replace(name, " ").split() == words.split()


def test_a_word_of_the_vocabulary_is_not_a_special_token() -> None:
    tokenizer = HFTokenizer(raw_tokenizer(byte_level_backend()), 512, {1})
    detokenizer = tokenizer.detokenizer((), ("e",))
    assert "".join(map(detokenizer.push, tokenizer.encode("e<|im_end|>e"))) == "ee"
