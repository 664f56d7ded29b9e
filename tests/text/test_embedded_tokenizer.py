"""The embedded model's own tokenizer: incremental text is its decoding in one go, for any tokens it may ever sample."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from microbatch.text.tokenizer import HFTokenizer

VOCAB_SIZE = 49152
STOPS = ["\n\n", " the", "aa", "\ufffd"]


@pytest.fixture(scope="module")
def raw(embedded_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model)


@pytest.fixture(scope="module")
def tokenizer(raw: Any) -> HFTokenizer:
    return HFTokenizer(raw, VOCAB_SIZE, {2})


@pytest.fixture(scope="module")
def fragments(raw: Any) -> list[int]:
    """Tokens that are no whole characters alone, so that they only come up in pairs by chance."""
    texts = raw.batch_decode([[i] for i in range(VOCAB_SIZE)])
    return [i for i, text in enumerate(texts) if "\ufffd" in text]


def tokens(rnd: random.Random, fragments: list[int]) -> list[int]:
    return [rnd.choice(fragments) if rnd.random() < 0.4 else rnd.randrange(VOCAB_SIZE) for _ in range(20)]


def test_random_tokens_join_to_their_one_shot_decoding(raw: Any, tokenizer: HFTokenizer, fragments: list[int]) -> None:
    rnd = random.Random(1)
    assert len(fragments) > 100
    for _ in range(2000):
        ids = tokens(rnd, fragments)
        detokenizer = tokenizer.detokenizer()
        text = "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish()
        assert text == raw.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), ids


def test_every_token_alone_and_after_half_a_character(raw: Any, tokenizer: HFTokenizer) -> None:
    (start,) = tokenizer.encode("😀", add_special_tokens=False)[:1]
    for ids in [[i] for i in range(VOCAB_SIZE)] + [[start, i] for i in range(0, VOCAB_SIZE, 7)]:
        detokenizer = tokenizer.detokenizer()
        text = "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish()
        assert text == raw.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), ids


def test_stop_texts_cut_the_one_shot_decoding(raw: Any, tokenizer: HFTokenizer, fragments: list[int]) -> None:
    rnd = random.Random(2)
    found = 0
    for _ in range(2000):
        ids = tokens(rnd, fragments)
        whole: str = raw.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        stops = [*STOPS[: rnd.randrange(4)], whole[5:7] or "x"]
        places = [whole.index(stop) for stop in stops if stop in whole]
        detokenizer = tokenizer.detokenizer(stops)
        text = "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish()
        assert text == (whole[: min(places)] if places else whole), (ids, stops)
        assert detokenizer.stopped == bool(places)
        found += bool(places)
    assert 500 < found
