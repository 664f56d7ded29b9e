"""What a tokenizer's decoder does to single tokens, read from its description.

Two families cover nearly every language model: byte-level BPE (each character of a token stands for a byte) and
sentencepiece (a marker stands for a space, ``<0xE2>`` for a byte). For both, text is the concatenation of the tokens'
bytes, which is what makes incremental text exact and cheap. Other decoders have no rules here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """``replacements`` are made in every token; ``marker`` is dropped from the first token and a space elsewhere;
    ``strip`` leading spaces of the whole text are dropped."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    marker: str = ""
    strip: int = 0

    def token_bytes(self, token: str, first: bool = False) -> bytes:
        """The exact bytes a token adds to the text."""
        if self.byte_level:
            return _from_byte_level(token)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.marker:
            token = token.replace(self.marker, "" if first else " ")
        return token.encode("utf-8")


def read_rules(description: bytes | None) -> DecodingRules | None:
    """Rules of a ``tokenizers`` decoder from the JSON that describes it; None when tokens do not simply concatenate."""
    if description is None:
        return None
    rules, fused = DecodingRules(), False
    steps = list(_steps(json.loads(description)))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecodingRules(byte_level=True)
    for step in steps:
        fused = fused or step["type"] == "Fuse"
        changed = _with_step(rules, step, fused)
        if changed is None:
            return None
        rules = changed
    return rules if steps else None


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder


def _with_step(rules: DecodingRules, step: Mapping[str, Any], fused: bool) -> DecodingRules | None:
    """The rules with one more step, or None for a step that is not a matter of single tokens."""
    match step:
        case {"type": "Fuse"}:
            return rules
        case {"type": "ByteFallback"} if not fused:
            return replace(rules, byte_fallback=True)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
            return replace(rules, replacements=(*rules.replacements, (old, new)))
        case {"type": "Metaspace", "replacement": str(marker), "prepend_scheme": "never"} if not fused:
            return replace(rules, replacements=(*rules.replacements, (marker, " ")))
        case {"type": "Metaspace", "replacement": str(marker)} if not fused and not rules.marker:
            return replace(rules, marker=marker)
        case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused and not rules.strip:
            return replace(rules, strip=start)
        case _:
            return None


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET: Final = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, written as plain text
        return token.encode("utf-8")
