"""Forms that can be used, and what is said of those that cannot."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from microbatch.core.structured import StructuredOutput
from microbatch.errors import ExecutionError, InvalidRequestError
from microbatch.text.bytes_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, ByteTokenizer
from microbatch.text.forms.bounds import MAX_DEPTH
from microbatch.text.forms.grammars import MAX_CHOICES, MAX_TEXT
from microbatch.text.forms.matching import GuidedForms
from microbatch.text.forms.vocabularies import of_tokens

FORMS = GuidedForms(lambda: of_tokens(ByteTokenizer()))


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


def allows(form: StructuredOutput, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    matcher = FORMS.matcher(form)
    try:
        matcher.accept([*text.encode(), EOS_TOKEN_ID])
    except ExecutionError:
        return False
    return True


def next_tokens(form: StructuredOutput, text: str) -> set[int]:
    matcher = FORMS.matcher(form)
    matcher.accept(list(text.encode()))
    words = bytearray(4 * (-(-VOCAB_SIZE // 32)))
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(words))
    FORMS.fill([matcher], address, len(words))
    return {i for i in range(VOCAB_SIZE) if words[i // 8] >> i % 8 & 1}


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form, good, bad",
    [
        (
            schema(PERSON),
            ['{"name": "Al", "age": 3}'],
            ['{"name": "Al"}', '{"age": 3}', '{"name": "abcdef", "age": 3}'],
        ),
        (schema({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ['"b"', "2"]),
        (schema({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}), ["true"], ["1"]),
        (StructuredOutput("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '{"a": }']),
        (StructuredOutput("regex", "[ab]{2}c?"), ["ab", "bac"], ["a", "abb", "abcc"]),
        (StructuredOutput("choice", '["yes", "no \\"x\\"", "ja\\n"]'), ["yes", 'no "x"', "ja\n"], ["ye", "yesno", ""]),
        (StructuredOutput("grammar", 'start: "a" b+\nb: "b" | "c"'), ["ab", "acbc"], ["a", "b"]),
        (StructuredOutput("grammar", 'root ::= "a" | "b" "c"'), ["a", "bc"], ["b", "abc"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_an_answer_of_the_form_is_allowed_and_no_other(form: StructuredOutput, good: list[str], bad: list[str]) -> None:
    FORMS.check(form)
    assert [text for text in good if not allows(form, text)] == []
    assert [text for text in bad if allows(form, text)] == []


def test_masks_say_what_may_come_next_and_at_the_end_only_the_end() -> None:
    form = StructuredOutput("regex", "a[bc]")
    assert next_tokens(form, "") == {ord("a")}
    assert next_tokens(form, "a") == {ord("b"), ord("c")}
    assert next_tokens(form, "ab") == {EOS_TOKEN_ID}
    assert next_tokens(StructuredOutput("regex", "ab?"), "a") == {ord("b"), EOS_TOKEN_ID}


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


@pytest.mark.parametrize(
    "form, said",
    [
        (schema({"type": "objekt"}), "the schema at $: Invalid type: objekt"),
        (
            schema({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}),
            '$.properties.a: Unimplemented keys: ["uniqueItems"]',
        ),
        (schema({"anyOf": [{"type": "string"}, {"not": {"type": "null"}}]}), "$.anyOf[1]: Unimplemented keys"),
        (schema({"$defs": {"x": {"type": "strin"}}, "$ref": "#/$defs/x"}), "$.$defs.x: Invalid type: strin"),
        (schema({"type": "array", "items": {"$ref": "#/$defs/no"}}), "$.items"),
        (schema({"$ref": "http://127.0.0.1:1/x"}), "$"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "$: regex parse error"),
        (schema({"type": "object", "minProperties": -1}), "$"),
        (schema([1]), "the schema must be an object"),
        (StructuredOutput("json_schema", "{"), "the schema is not valid JSON"),
        (schema(deep(MAX_DEPTH)), f"nested deeper than {MAX_DEPTH}"),
        (StructuredOutput("json_schema", "[" * 50_000), "the schema is not valid JSON"),
        (StructuredOutput("json_schema", " " * MAX_TEXT + "{}"), f"over the limit of {MAX_TEXT}"),
        (StructuredOutput("regex", "(a"), "the regex at character 0: unclosed group"),
        (StructuredOutput("regex", "ab(?=c)"), "the regex at character 2: look-around"),
        (StructuredOutput("grammar", "start: foo"), 'the grammar: at 1(8): unknown name: "foo"'),
        (StructuredOutput("grammar", "x: 'a'"), "the grammar"),
        (StructuredOutput("grammar", "root ::= ("), "the grammar is not valid GBNF"),
        (StructuredOutput("choice", "[]"), "choice must be a list of texts"),
        (StructuredOutput("choice", '["a", ""]'), "none of them empty"),
        (StructuredOutput("choice", '["a", 1]'), "choice must be a list of texts"),
        (StructuredOutput("choice", json.dumps([str(i) for i in range(MAX_CHOICES + 1)])), f"at most {MAX_CHOICES}"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(form: StructuredOutput, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        FORMS.check(form)
    assert said in raised.value.message and "\n" not in raised.value.message
    with pytest.raises(InvalidRequestError):
        FORMS.matcher(form)


def test_matchers_of_one_form_do_not_know_of_each_other() -> None:
    form = StructuredOutput("regex", "ab|cd")
    one, other = FORMS.matcher(form), FORMS.matcher(form)
    one.accept([ord("a")])
    other.accept([ord("c"), ord("d")])
    one.accept([ord("b"), EOS_TOKEN_ID])
    with pytest.raises(ExecutionError, match="left its form"):
        FORMS.matcher(form).accept([ord("a"), ord("d")])


def test_forms_are_kept_up_to_a_bound_and_may_be_asked_for_by_many_threads() -> None:
    forms = GuidedForms(lambda: of_tokens(ByteTokenizer()))
    failures: list[BaseException] = []

    def ask(start: int) -> None:
        try:
            for number in range(start, start + 120):
                forms.matcher(StructuredOutput("regex", f"a{{{number % 300}}}b"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 60, 120, 180)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(forms._ready) <= 256


def test_a_tokenizer_without_an_end_cannot_be_used() -> None:
    class Endless(ByteTokenizer):
        eos_token_ids = frozenset()

    with pytest.raises(InvalidRequestError, match="without an end token"):
        of_tokens(Endless())
