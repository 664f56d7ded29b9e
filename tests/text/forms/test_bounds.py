"""Forms from strangers: whatever they ask for is known in a moment, and what cannot be kept to is refused."""

from __future__ import annotations

import json
import string
import time
from typing import Any

import pytest

from microbatch.core.structured import StructuredOutput
from microbatch.errors import InvalidRequestError
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.text.forms.bounds import MAX_COMBINED, check_bounds
from microbatch.text.forms.matching import GuidedForms
from microbatch.text.forms.vocabularies import of_tokens

FORMS = GuidedForms(lambda: of_tokens(ByteTokenizer()))
#: Generous for a busy machine; without the bounds these take from seconds to hours.
A_MOMENT = 5.0


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


def has_letter(letter: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"[a-z]*{letter}[a-z]*"}


def all_of(count: int) -> dict[str, Any]:
    return {"allOf": [has_letter(letter) for letter in string.ascii_lowercase[:count]]}


def nested(count: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for letter in string.ascii_lowercase[:count]:
        value = {**has_letter(letter), "anyOf": [value]}
    return value


def chained(count: int) -> dict[str, Any]:
    letters = string.ascii_lowercase[:count]
    defs = {f"d{i}": {**has_letter(letter), "$ref": f"#/$defs/d{i + 1}"} for i, letter in enumerate(letters)}
    return {"$defs": {**defs, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("make", [all_of, nested, chained])
def test_patterns_that_hold_at_once_are_bounded_however_they_are_put_together(make: Any) -> None:
    check_bounds(make(MAX_COMBINED))
    for form in (schema(make(24)), StructuredOutput("grammar", f"start: %json // a\n {json.dumps(make(24))}")):
        began = time.perf_counter()
        with pytest.raises(InvalidRequestError, match=f"combines more than {MAX_COMBINED} patterns"):
            FORMS.check(form)
        assert time.perf_counter() - began < A_MOMENT


@pytest.mark.parametrize("multiple", [1, 3, 0.01, 2.5, 1e-2, 100, 10_000, 1.0])
def test_usual_multiples_are_taken(multiple: float) -> None:
    FORMS.check(schema({"type": "number", "multipleOf": multiple}))


def test_many_patterns_that_never_meet_are_no_reason_to_refuse() -> None:
    optional = {
        f"p{i}": {"anyOf": [{"type": "string", "pattern": f"^x{i}$"}, {"type": "null"}], "title": "P"}
        for i in range(99)
    }
    FORMS.check(schema({"type": "object", "properties": optional, "required": list(optional)}))


@pytest.mark.parametrize(
    "form, said",
    [
        (schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), '["uniqueItems"]'),
        (schema({"x-guidance": {"coerce_one_of": True}, "oneOf": [{}, {"type": "string"}]}), "oneOf"),
        (StructuredOutput("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'), '["not"]'),
        (StructuredOutput("grammar", '{"grammars": [{"json_schema": {"type": "object"}}]}'), "must be in the Lark"),
        (schema({"$ref": "#"}), "no answer can have this form"),
        (StructuredOutput("grammar", "start: start"), "no answer can have this form"),
        (StructuredOutput("regex", r"[^\s\S]"), "no answer can have this form"),
        (schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "too complex"),
        (schema({"type": "object", "properties": {f"p{i}": {} for i in range(900)}}), "too complex"),
        (schema({"patternProperties": {f"^k{i}$": {} for i in range(500)}}), "more than 40 names"),
        (schema({"allOf": [{"patternProperties": {f"^k{i}$": {}}} for i in range(200)]}), "more than 40 names"),
        (schema({"$defs": {"a": {}}, "allOf": [{"$ref": "#/$defs/a"}] * 1500}), "more than 200 parts to combine"),
        (schema({"type": "integer", "multipleOf": 4_000_037}), "multipleOf of more than 10000"),
        (schema({"type": "number", "multipleOf": 40_000.37}), "multipleOf of more than 10000"),
        (schema({"type": "integer", "multipleOf": 10**400}), "multipleOf of more than 10000"),
        (schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf of more than 10000"),
        (schema({"multipleOf": 9973, "anyOf": [{"multipleOf": 9967}]}), "multipleOf of more than 10000"),
        (StructuredOutput("regex", "(a{1000}){1000}"), "too complex"),
        (StructuredOutput("grammar", "start: " + '("a"|"b")? ' * 3000), "too complex"),
        (StructuredOutput("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "not valid GBNF"),
        (StructuredOutput("json_schema", '{"const": NaN}'), "not valid JSON"),
        (StructuredOutput("json_schema", '{"enum": [1e999]}'), "not valid JSON"),
        (StructuredOutput("json_schema", '{"const": "\\ud800"}'), "not valid JSON"),
        (StructuredOutput("json_schema", '{"const": ' + "9" * 400 + "}"), "not valid JSON"),
        (StructuredOutput("json_schema", '{"type": "string", "type": "null"}'), "a key twice"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_in_a_moment(form: StructuredOutput, said: str) -> None:
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError) as raised:
        FORMS.check(form)
    assert said in raised.value.message and "\n" not in raised.value.message
    assert time.perf_counter() - began < A_MOMENT


def test_the_place_of_an_error_is_looked_for_within_a_bound() -> None:
    shape = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,9}$"}}}
    used = {f"p{i}": {"$ref": f"#/$defs/d{i % 300}"} for i in range(900)}
    large = {"$defs": {f"d{i}": shape for i in range(300)}, "properties": {**used, "z": {"not": {}}}}
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError, match="Unimplemented keys"):
        FORMS.check(schema(large))
    assert time.perf_counter() - began < A_MOMENT
