"""The grammars of forced and strict calls: what they say, and that llguidance takes what the parsers read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from microbatch.text.tool_calls.choosing import PARSERS
from microbatch.text.tool_calls.grammar import force_calls, keep_strict, needs_constraint
from tests.text.tool_calls.support import told

SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
F = {"name": "f", "parameters": SCHEMA, "strict": True}
G = {"name": "get_weather"}


def test_a_named_function() -> None:
    forced = force_calls("hermes", [F], parallel=False)
    assert forced.prefix == "<tool_call>\n" and forced.form.kind == "grammar"
    assert forced.form.text == (
        "start:  call \n"
        "call: call_0\n"
        'call_0: "{\\"name\\": \\"f\\", \\"arguments\\": " args_0 "}\\n</tool_call>"\n'
        f"args_0: %json {json.dumps(SCHEMA)}\n"
    )


def test_a_function_without_parameters_takes_none() -> None:
    assert '"additionalProperties": false' in force_calls("hermes", [G], parallel=False).form.text


def test_only_strict_functions_are_held_to_their_schema() -> None:
    assert needs_constraint([G, F]) and not needs_constraint([G, {**F, "strict": False}])
    text = keep_strict("hermes", [F, {**F, "name": "g", "strict": None}])
    assert 'args_1: %json {"type": "object"}\n' in text.text and json.dumps(SCHEMA) in text.text


def test_markers_that_are_tokens() -> None:
    text = keep_strict("mistral", [F], lambda marker: f"<[{len(marker)}]>").text
    assert text.startswith('start: TEXT (<[12]> "[" call (", " call)* "]")?\n')


#: Markers that are single tokens of their models, behind the bytes and the end token.
MARKERS = tuple(marker for name in ("mistral", "harmony") for marker in PARSERS[name].special)


def terminal(marker: str) -> str:
    return f"<[{257 + MARKERS.index(marker)}]>"


def tokens(text: str) -> list[int]:
    """Bytes, and the markers."""
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, MARKERS))})", text):
        ids += [257 + MARKERS.index(part)] if part in MARKERS else list(part.encode())
    return ids


@pytest.fixture(scope="module")
def guidance() -> Any:
    """Whether a grammar takes a text, and whether the text may end there."""
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")

    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = [*(bytes([i]) for i in range(256)), b"<eos>", *(marker.encode() for marker in MARKERS)]
        special_token_ids = [256, *(257 + i for i in range(len(MARKERS)))]

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))

    def takes(grammar: str, text: str) -> tuple[bool, bool]:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.get_error(), matcher.get_error()
        ids = tokens(text)
        taken: int = matcher.try_consume_tokens(ids)
        return taken == len(ids), bool(taken == len(ids) and matcher.is_accepting())

    return takes


CALLS = {
    "hermes": ('{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "\n<tool_call>\n"),
    "llama": ('{"name": "f", "parameters": {"a": 1}}', "; "),
    "mistral": ('{"name": "f", "arguments": {"a": 1}}', ", "),
    "harmony": ('.f <|constrain|>json<|message|>{"a": 1}', None),
}


@pytest.mark.parametrize("name", PARSERS)
def test_forced_answers_are_what_the_parser_reads(guidance: Any, name: str) -> None:
    (call, between), listed = CALLS[name], name == "mistral"
    one = f"[{call}]" if listed else call
    forced = force_calls(name, [F, G], True, terminal)
    assert guidance(forced.form.text, one) == (True, True)
    assert guidance(forced.form.text, one.replace("1", '"x"'))[0] is False
    assert guidance(forced.form.text, "Hello")[0] is False
    assert guidance(forced.form.text, one.replace("f", "other"))[0] is False
    assert told(name, forced.prefix + one) == ("", [("f", '{"a": 1}')], "")
    if between:
        two = f"[{call}{between}{call}]" if listed else call + between + call
        assert guidance(forced.form.text, two) == (True, True)
        assert guidance(force_calls(name, [F, G], False, terminal).form.text, two)[0] is False
        assert told(name, forced.prefix + two) == ("", [("f", '{"a": 1}')] * 2, "")


FREE = {
    "hermes": ("Hi {x}.", f"Hm.\n<tool_call>\n{CALLS['hermes'][0]}", "<tool_call>\n{}"),
    "llama": ("Hi {x}.", CALLS["llama"][0], '{"x": 1}'),
    "mistral": ("Hi {x}.", f"[TOOL_CALLS][{CALLS['mistral'][0]}]", "[TOOL_CALLS]x"),
    "harmony": (
        "<|channel|>final<|message|>Hi {x}.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions"
        + CALLS["harmony"][0],
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[",
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_free_answers_with_strict_calls(guidance: Any, name: str) -> None:
    text, call, bad = FREE[name]
    grammar = keep_strict(name, [F, G], terminal).text
    assert guidance(grammar, text) == (True, True)
    assert guidance(grammar, call) == (True, True)
    assert told(name, call)[1] == [("f", '{"a": 1}')]
    assert guidance(grammar, bad)[0] is False
    assert guidance(grammar, call.replace("1", '"x"'))[0] is False
