"""Rules read from the description of a decoder."""

from __future__ import annotations

import pytest
from tokenizers import decoders

from microbatch.text.decoding import DecodingRules, read_rules

LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.mark.parametrize(
    ("decoder", "rules"),
    [
        (decoders.ByteLevel(), DecodingRules(byte_level=True)),
        (decoders.Sequence([decoders.ByteLevel()]), DecodingRules(byte_level=True)),
        (decoders.Sequence(LLAMA), DecodingRules(byte_fallback=True, replacements=(("▁", " "),))),
        (
            decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
            DecodingRules(byte_fallback=True, replacements=(("▁", " "),), strip=1),
        ),
        (decoders.Metaspace(), DecodingRules(marker="▁")),
        (decoders.Metaspace(prepend_scheme="never"), DecodingRules(replacements=(("▁", " "),))),
    ],
)
def test_decoders_whose_tokens_concatenate(decoder: decoders.Decoder, rules: DecodingRules) -> None:
    assert read_rules(decoder.__getstate__()) == rules


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Sequence([]),
    ],
)
def test_decoders_that_look_at_neighbours_have_no_rules(decoder: decoders.Decoder) -> None:
    assert read_rules(decoder.__getstate__()) is None


def test_no_decoder_has_no_rules() -> None:
    assert read_rules(None) is None


def test_bytes_of_tokens() -> None:
    assert DecodingRules(byte_level=True).token_bytes("Ġé") == b" \xe9"
    assert DecodingRules(byte_level=True).token_bytes("<tool call>") == b"<tool call>"
    assert DecodingRules(byte_fallback=True).token_bytes("<0xE2>") == b"\xe2"
    assert DecodingRules().token_bytes("<0xE2>") == b"<0xE2>"
    assert DecodingRules(marker="▁").token_bytes("▁a▁b", first=True) == b"ab"
    assert DecodingRules(marker="▁").token_bytes("▁a▁b") == b" a b"
