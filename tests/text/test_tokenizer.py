"""The wrapped tokenizer: ids, exact bytes, chat templates, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from microbatch.core import ports
from microbatch.errors import InvalidRequestError, SetupError
from microbatch.text.bytes_tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, ByteTokenizer
from microbatch.text.tokenizer import HFTokenizer
from tests.text.toy_tokenizers import (
    CHATML,
    byte_level_backend,
    raw_tokenizer,
    sentencepiece_backend,
    token_id,
    wordpiece_backend,
)

HI: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]


def make(chat_template: str | None = None, own_template: str | None = CHATML) -> HFTokenizer:
    return HFTokenizer(raw_tokenizer(byte_level_backend(), own_template), 512, {2, 0}, chat_template)


def test_properties() -> None:
    tokenizer = make()
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (512, frozenset({0, 2}))


def test_encode_equals_the_library() -> None:
    raw = raw_tokenizer(byte_level_backend())
    text = "The capital <|im_end|> 😀 of\n\n France "
    assert make().encode(text) == raw.encode(text)
    assert make().encode("") == []


def test_special_tokens_are_added_only_when_asked() -> None:
    backend = Tokenizer.from_str(sentencepiece_backend().to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = HFTokenizer(raw_tokenizer(backend), 512, {2})
    assert tokenizer.encode("The")[0] == 1
    assert tokenizer.encode("The", add_special_tokens=False) == tokenizer.encode("The")[1:]


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    backend = Tokenizer.from_str(byte_level_backend().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=20)
    raw = raw_tokenizer(backend)
    assert len(HFTokenizer(raw, 512, {2}).encode("one two three four five six")) > 2
    assert len(HFTokenizer(raw, 512, {2}).encode("a")) == 1


def test_text_with_half_a_surrogate_pair_is_refused() -> None:
    for tokenizer in (make(), ByteTokenizer()):
        with pytest.raises(InvalidRequestError, match="character 1"):
            tokenizer.encode("a\ud83d b")


def test_decode_leaves_special_tokens_out() -> None:
    tokenizer = make()
    assert tokenizer.decode([1, *tokenizer.encode("Paris"), 2, 511]) == "Paris"


def test_exact_bytes_of_every_token() -> None:
    tokenizer, backend = make(), byte_level_backend()
    text = "中é😀 a"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_text(i)[1] for i in ids) == text.encode()
    half = token_id(backend, "ð")
    assert tokenizer.token_text(half) == ("\ufffd", b"\xf0")
    assert tokenizer.token_text(2) == ("<|im_end|>", b"<|im_end|>")
    assert tokenizer.token_text(511) == ("", b"")


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = HFTokenizer(raw_tokenizer(sentencepiece_backend()), 512, {2})
    backend = sentencepiece_backend()
    assert tokenizer.token_text(token_id(backend, "▁Paris")) == (" Paris", b" Paris")
    assert tokenizer.token_text(token_id(backend, "<0xE4>")) == ("\ufffd", b"\xe4")


def test_bytes_of_tokens_without_rules() -> None:
    tokenizer = HFTokenizer(raw_tokenizer(wordpiece_backend()), 9, {1})
    assert tokenizer.token_text(4) == ("world", b"world")


def test_a_tokenizer_without_a_fast_version_is_refused() -> None:
    with pytest.raises(SetupError, match="fast version"):
        HFTokenizer(object(), 10, {1})


def test_chat_ids_equal_the_library() -> None:
    raw = raw_tokenizer(byte_level_backend(), CHATML)
    messages: list[dict[str, object]] = [{"role": "system", "content": "Be brief"}, *HI]
    want = raw.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert make().apply_chat_template(messages) == want


def test_a_model_without_a_template_names_the_flag() -> None:
    with pytest.raises(InvalidRequestError, match="--chat-template") as caught:
        make(own_template=None).apply_chat_template(HI)
    assert caught.value.param == "messages"


def test_a_given_template_wins() -> None:
    tokenizer = make("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert tokenizer.decode(tokenizer.apply_chat_template(HI)) == "[Hi]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
    ],
)
def test_what_a_template_raises_is_told(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        make(own_template=template).apply_chat_template(HI)
    assert caught.value.param == "messages"
    assert "Traceback" not in caught.value.message


def test_a_given_template_that_does_not_parse_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="--chat-template is not valid: line 1"):
        make("{% if %}")


def test_a_given_template_may_refuse_the_probe() -> None:
    tokenizer = make("{{ raise_exception('never') }}")
    with pytest.raises(InvalidRequestError, match="never"):
        tokenizer.apply_chat_template(HI)


def test_many_threads_get_the_same_answers_as_one() -> None:
    tokenizer = make()
    texts = [f"The capital of France is {i} 😀" for i in range(8)]
    ids = [tokenizer.encode(text) for text in texts]
    want = [(i, tokenizer.decode(i), tokenizer.apply_chat_template(HI)) for i in ids]
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(25):
            for text, expected in zip(texts, want):
                try:
                    ids = tokenizer.encode(text)
                    got = (ids, tokenizer.decode(ids), tokenizer.apply_chat_template(HI))
                except BaseException as error:
                    wrong.append(error)
                    return
                if got != expected:
                    wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    assert tokenizer.encode("é") == [BOS_TOKEN_ID, 0xC3, 0xA9]
    assert tokenizer.encode("é", add_special_tokens=False) == [0xC3, 0xA9]
    assert tokenizer.decode([BOS_TOKEN_ID, *b"ok\xff", EOS_TOKEN_ID]) == "ok\ufffd"
    assert tokenizer.token_text(0x41) == ("A", b"A")
    assert tokenizer.token_text(0xC3) == ("\ufffd", b"\xc3")
    assert tokenizer.token_text(EOS_TOKEN_ID) == ("<eos>", b"<eos>")
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (258, frozenset({EOS_TOKEN_ID}))
    assert ByteTokenizer().decode(ByteTokenizer().apply_chat_template(HI)) == "user: Hi\nassistant:"


def test_ports_are_met() -> None:
    tokenizers: list[ports.Tokenizer] = [make(), ByteTokenizer()]
    detokenizers: list[ports.Detokenizer] = [t.detokenizer() for t in tokenizers]
    assert [d.stopped for d in detokenizers] == [False, False]
