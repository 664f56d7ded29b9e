"""Forms over the families of tokenizers: whatever the masks allow, the text that is shown is of the form."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from microbatch.core.structured import StructuredOutput
from microbatch.errors import InvalidRequestError
from microbatch.text.forms.matching import GuidedForms
from microbatch.text.forms.vocabularies import of_transformers
from microbatch.text.tokenizer import HFTokenizer
from tests.text import toy_tokenizers as toys

EOS = 2
CASES: list[tuple[StructuredOutput, Callable[[str], Any]]] = [
    (StructuredOutput("choice", json.dumps([" The", " a"])), lambda text: text in (" The", " a")),
    (StructuredOutput("choice", json.dumps(["The capital"])), lambda text: text == "The capital"),
    (StructuredOutput("choice", json.dumps(["Hello world", "é😀"])), lambda text: text in ("Hello world", "é😀")),
    (StructuredOutput("regex", " ?a( a)*"), lambda text: re.fullmatch(" ?a( a)*", text)),
]


def walk(tokenizer: HFTokenizer, forms: GuidedForms, form: StructuredOutput, seed: int) -> str | None:
    """The text of tokens drawn among those that are allowed; None for one that has no end soon."""
    rnd, matcher, text = random.Random(seed), forms.matcher(form), ""
    detokenizer = tokenizer.detokenizer(whole=True)
    words = -(-tokenizer.vocab_size // 32)
    for _ in range(60):
        mask = torch.zeros(words, dtype=torch.int32)
        forms.fill([matcher], mask.data_ptr(), words * 4)
        allowed = (mask[:, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten().nonzero().flatten().tolist()
        token_id = rnd.choice(allowed)
        if token_id == EOS:
            return text + detokenizer.finish()
        matcher.accept([token_id])
        text += detokenizer.push(token_id)
    return None


@pytest.mark.parametrize("make", [toys.byte_level_backend, toys.sentencepiece_backend])
@pytest.mark.parametrize("form, fits", CASES)
def test_the_text_that_is_shown_is_of_the_form(
    make: Callable[[], Any], form: StructuredOutput, fits: Callable[[str], Any]
) -> None:
    raw = PreTrainedTokenizerFast(tokenizer_object=make())
    size = len(raw) + 7
    tokenizer = HFTokenizer(raw, size, [EOS])
    forms = GuidedForms(partial(of_transformers, raw, size, [EOS]))
    texts = [text for seed in range(40) if (text := walk(tokenizer, forms, form, seed)) is not None]
    assert texts and [text for text in texts if not fits(text)] == []


@pytest.mark.parametrize("make", [toys.metaspace_backend, toys.wordpiece_backend])
def test_a_tokenizer_that_the_library_cannot_read_is_refused(make: Callable[[], Any]) -> None:
    raw = PreTrainedTokenizerFast(tokenizer_object=make())
    forms = GuidedForms(partial(of_transformers, raw, len(raw), [1]))
    with pytest.raises(InvalidRequestError, match="cannot be held to a form"):
        forms.check(StructuredOutput("regex", "a"))
