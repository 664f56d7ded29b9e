"""Incremental text equals the text decoded in one go, never splits a character, never shows a part of a stop text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.text.tokenizer import HFTokenizer
from tests.text.toy_tokenizers import (
    byte_level_backend,
    metaspace_backend,
    raw_tokenizer,
    sentencepiece_backend,
    token_id,
    wordpiece_backend,
)

TEXTS = [
    " hello world",
    "x = [ 1 , 2 ] .",
    "    indented .",
    "do n't",
    "hi 😀👨‍👩‍👧 中文 é",
    "\n\n",
    "",
    "a\x00b",
    "\ufeffHi",
]
BACKENDS = {
    "byte-level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "metaspace": metaspace_backend,
    "wordpiece": wordpiece_backend,
}


def wrap(backend: Tokenizer) -> tuple[Any, HFTokenizer]:
    raw = raw_tokenizer(backend)
    return raw, HFTokenizer(raw, backend.get_vocab_size() + 5, {2})


def one_shot(raw: Any, ids: list[int]) -> str:
    text: str = raw.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def pieces(tokenizer: HFTokenizer | ByteTokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(stop)
    return [detokenizer.push(i) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_join_to_its_one_shot_decoding(name: str, text: str) -> None:
    raw, tokenizer = wrap(BACKENDS[name]())
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, ids)
    assert "".join(got) == one_shot(raw, ids) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in got)


@settings(max_examples=300)
@given(st.lists(st.integers(0, byte_level_backend().get_vocab_size() + 4), max_size=30))
def test_any_ids_of_a_byte_level_tokenizer(ids: list[int]) -> None:
    raw, tokenizer = wrap(byte_level_backend())
    assert "".join(pieces(tokenizer, ids)) == one_shot(raw, ids) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(st.text(max_size=20))
def test_any_text_of_a_sentencepiece_tokenizer(text: str) -> None:
    raw, tokenizer = wrap(sentencepiece_backend())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == one_shot(raw, ids) == tokenizer.decode(ids)


def is_whole(ids: list[int]) -> bool:
    """Whether every run of byte tokens (ids 3 to 258) is valid UTF-8, so that there is one right text."""
    run, runs = b"", []
    for i in ids:
        if 3 <= i < 259:
            run += bytes([i - 3])
        elif i > 2:
            runs.append(run)
            run = b""
    try:
        return all(part.decode("utf-8") is not None for part in [*runs, run])
    except UnicodeDecodeError:
        return False


WORD = st.one_of(st.integers(0, 2), st.integers(259, sentencepiece_backend().get_vocab_size() + 3)).map(lambda i: [i])
CHARACTER = st.characters(codec="utf-8").map(lambda c: [byte + 3 for byte in c.encode("utf-8")])


@settings(max_examples=300)
@given(st.lists(WORD | CHARACTER, max_size=15).map(lambda groups: [i for group in groups for i in group]))
def test_any_whole_characters_of_a_sentencepiece_tokenizer(ids: list[int]) -> None:
    raw, tokenizer = wrap(sentencepiece_backend())
    assert is_whole(ids)
    assert "".join(pieces(tokenizer, ids)) == one_shot(raw, ids)


def test_a_whole_character_survives_broken_bytes_behind_it() -> None:
    raw, tokenizer = wrap(sentencepiece_backend())
    ids = [byte + 3 for byte in "中".encode() + b"\xf0\x9f"]
    assert pieces(tokenizer, ids) == ["", "", "中", "", "", "\ufffd"]
    assert one_shot(raw, ids) == "\ufffd" * 5, "what decoding in one go makes of it"


@pytest.mark.parametrize("name", ["metaspace", "wordpiece"])
@settings(max_examples=100)
@given(data=st.data())
def test_any_ids_of_the_other_decoders(name: str, data: st.DataObject) -> None:
    raw, tokenizer = wrap(BACKENDS[name]())
    ids = data.draw(st.lists(st.integers(0, BACKENDS[name]().get_vocab_size() - 1), max_size=20))
    assert "".join(pieces(tokenizer, ids)) == one_shot(raw, ids) == tokenizer.decode(ids)


def test_metaspace_that_never_prepends_keeps_the_first_space() -> None:
    raw, tokenizer = wrap(metaspace_backend("never"))
    ids = [3, 4, 2, 6]
    assert "".join(pieces(tokenizer, ids)) == one_shot(raw, ids) == " Hello world x y"


def test_bytes_of_half_a_character_come_at_the_end_as_replacement_characters() -> None:
    raw, tokenizer = wrap(byte_level_backend())
    start = tokenizer.encode("😀", add_special_tokens=False)[0]
    byte = token_id(byte_level_backend(), "ð")
    assert pieces(tokenizer, [byte] * 3) == ["", "\ufffd", "\ufffd", "\ufffd"]
    assert "".join(pieces(tokenizer, [start])) == one_shot(raw, [start])


def test_ascii_waits_for_nothing() -> None:
    tokenizer = ByteTokenizer()
    assert pieces(tokenizer, tokenizer.encode("a😀b")) == ["a", "", "", "", "😀", "b", ""]


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_stop_texts_hold_at_any_token_edge(text: str, stops: list[str]) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    found = [text.index(stop) for stop in stops if stop in text]
    detokenizer = tokenizer.detokenizer(stops)
    got = "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish()
    assert got == (text[: min(found)] if found else text)
    assert detokenizer.stopped == bool(found)


def test_a_stop_inside_one_token_cuts_the_token() -> None:
    _, tokenizer = wrap(byte_level_backend())
    (token,) = tokenizer.encode(" river", add_special_tokens=False) or [0]
    detokenizer = tokenizer.detokenizer(["iv"])
    assert (detokenizer.push(token), detokenizer.stopped) == (" r", True)
    assert detokenizer.push(token) == detokenizer.finish() == ""


def test_the_flushed_replacement_character_may_complete_a_stop() -> None:
    tokenizer = ByteTokenizer()
    detokenizer = tokenizer.detokenizer(["a\ufffd"])
    assert [detokenizer.push(i) for i in b"xa\xf0"] == ["x", "", ""]
    assert (detokenizer.finish(), detokenizer.stopped) == ("", True)


def test_work_per_token_does_not_grow_with_the_text() -> None:
    raw, _ = wrap(wordpiece_backend())
    lengths: list[int] = []

    class Spy:
        chat_template = None
        backend_tokenizer = raw.backend_tokenizer

        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            text: str = raw.decode(ids, **options)
            return text

    tokenizer = HFTokenizer(Spy(), 9, {1})
    ids = [2, 4, 1, 3] * 200 + [1] * 500 + [2]
    assert "".join(pieces(tokenizer, ids)) == one_shot(raw, ids)
    assert max(lengths) < 40
