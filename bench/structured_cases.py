"""What ``bench.structured`` asks for: forms with an answer each, keywords with an answer that breaks them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any, Final

from microbatch.executor.embedded import default_home, embedded_folder

_PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "born", "tags", "address"],
    "additionalProperties": False,
}
_TREE: Final = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_WIDE: Final = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string", "maxLength": 100} for i in range(100)},
    "required": [f"field_{i}" for i in range(100)],
    "additionalProperties": False,
}
#: Kind, text, and an answer in this form.
FORMS: Final[dict[str, tuple[str, str, str]]] = {
    "any object": (
        "json_schema",
        json.dumps({"type": "object"}),
        json.dumps({"a": [1, 2.5, {"b": None}], "c": "text"}),
    ),
    "person": (
        "json_schema",
        json.dumps(_PERSON),
        json.dumps({"name": "Ada", "born": "1815-12-10", "tags": ["red"], "address": {"zip": "12345"}}),
    ),
    "tree": ("json_schema", json.dumps(_TREE), json.dumps({"value": 1, "next": {"value": 22, "next": None}})),
    "100 fields": ("json_schema", json.dumps(_WIDE), json.dumps({f"field_{i}": "some text" for i in range(100)})),
    "enum of 1000": ("json_schema", json.dumps({"enum": [f"value {i * 7919}" for i in range(1000)]}), '"value 7919"'),
    "date regex": ("regex", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]", "1999-12-31"),
    "bounded text": ("regex", "[a-zA-Z ,.]{20,2000}", "The river was wide and slow, and the boats went down."),
}
_TWO_TEXTS: Final = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
#: A schema, and an answer that it forbids.
KEYWORDS: Final[dict[str, tuple[Any, Any]]] = {
    "type": ({"type": "integer"}, "a"),
    "enum": ({"enum": ["a", 1]}, "b"),
    "const": ({"const": {"a": 1}}, {"a": 2}),
    "minLength": ({"type": "string", "minLength": 3}, "ab"),
    "maxLength": ({"type": "string", "maxLength": 3}, "abcd"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "b"),
    "pattern within": ({"type": "string", "pattern": "b"}, "aaa"),
    "format date": ({"type": "string", "format": "date"}, "2020-13-45"),
    "format email": ({"type": "string", "format": "email"}, "no"),
    "format unknown": ({"type": "string", "format": "zip-code"}, "no"),
    "minimum": ({"type": "integer", "minimum": 5}, 4),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 1.5}, 1.5),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, 4),
    "required": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {}),
    "additionalProperties": ({"type": "object", "properties": {}, "additionalProperties": False}, {"a": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, {"ab": "x"}),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, {"ab": 1}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, {"a": 1}),
    "minItems": ({"type": "array", "minItems": 2}, [1]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1, 2]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}]}, ["a"]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "contains": {"type": "string"}}, [1]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "a"),
    "allOf": ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "ab"),
    "oneOf that overlaps": (_TWO_TEXTS, "a"),
    "not": ({"not": {"type": "string"}}, "a"),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "ab"),
    "$ref": ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"}, "a"),
    "beside $ref": ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "maxLength": 1}, "ab"),
    "$ref elsewhere": ({"$ref": "http://example.org/schema"}, "a"),
    "unknown keyword": ({"type": "string", "maxLenght": 1}, "ab"),
}


@functools.cache
def vocabulary(size: int) -> tuple[bytes, ...]:
    """The bytes of SmolLM2's tokens, made up to ``size`` by joining two of them."""
    from transformers import AutoTokenizer

    from microbatch.text.tokenizer import HFTokenizer

    raw = AutoTokenizer.from_pretrained(embedded_folder(default_home()))
    tokenizer = HFTokenizer(raw, len(raw), [2])
    tokens = dict.fromkeys(tokenizer.token_text(i)[1] for i in range(len(raw)))
    tokens.pop(b"", None)
    real, rnd = list(tokens), random.Random(1)
    while len(tokens) < size:
        tokens[rnd.choice(real[300:]) + rnd.choice(real[300:])] = None
    return tuple(tokens)[:size]


def pieces(text: str, tokens: Sequence[bytes]) -> list[int]:
    """A text as tokens, the longest that fits at each place. The first three ids are special."""
    ids, longest = _ids(tuple(tokens))
    data, place, found = text.encode(), 0, []
    while place < len(data):
        end = next(e for e in range(min(len(data), place + longest), place, -1) if data[place:e] in ids)
        found.append(ids[data[place:end]])
        place = end
    return found


@functools.cache
def _ids(tokens: tuple[bytes, ...]) -> tuple[dict[bytes, int], int]:
    return {token: i for i, token in enumerate(tokens) if i > 2}, max(map(len, tokens))
