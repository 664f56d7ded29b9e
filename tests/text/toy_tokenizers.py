"""Small tokenizers of the two families that language models use, built here: no file and no network."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris. Once upon a time there was a river.",
    "x = [ 1 , 2 ] . do n't    indented\n\n\tline",
    "hi 😀👨‍👩‍👧 中文字 é ü ñ Ελλάδα",
    "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
] * 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def byte_level_backend() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and SmolLM2 have it: ids 0 to 2 are special, 3 is an added plain token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call> é", normalized=False)])
    return tokenizer


@functools.cache
def sentencepiece_backend() -> Tokenizer:
    """BPE over text with a marker for spaces and a token for each byte, as Llama 2 and Mistral have it."""
    special = ["<unk>", "<s>", "</s>"]
    words = "▁ ▁The ▁capital ▁of ▁is ▁Paris a b c e s ▁a 中 文 é . , ▁▁".split(" ")
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)] + words
    merges = [("▁", "a"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


@functools.cache
def metaspace_backend(prepend_scheme: str = "always") -> Tokenizer:
    """Unigram-like pieces with the Metaspace decoder, whose first token loses its marker."""
    vocabulary = {
        piece: i for i, piece in enumerate(["<unk>", "</s>", "▁", "▁Hello", "▁world", "lo", "x▁y", "é", "😀"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@functools.cache
def wordpiece_backend() -> Tokenizer:
    """A decoder that looks at the neighbours of a token: the general way must do."""
    vocabulary = {
        piece: i for i, piece in enumerate(["[UNK]", "[SEP]", "hello", "##lo", "world", ".", "do", "n't", "é"])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def token_id(backend: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found: int | None = backend.token_to_id(token)
    assert found is not None, token
    return found


def raw_tokenizer(backend: Tokenizer, chat_template: str | None = None) -> Any:
    """The transformers tokenizer over a backend."""
    raw = PreTrainedTokenizerFast(tokenizer_object=backend)
    raw.chat_template = chat_template
    return raw
