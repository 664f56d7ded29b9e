"""However an answer is cut into pieces, the events are the same, and no marker shows."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from microbatch.text.tool_calls.choosing import PARSERS
from tests.text.tool_calls.support import read

#: What answers are put together of: markers, parts of calls and things that are nearly one.
PARTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "\n"],
    "llama": ["<|python_tag|>", ";", "; ", "<|py", "\n"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ", ", "f", "abc123XYZ"],
    "harmony": [
        *("<|start|>assistant", "<|channel|>final", "<|channel|>analysis", "<|channel|>commentary to=functions.f "),
        *("<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", " to=functions.f", "<|st"),
    ],
}
COMMON = [
    '{"name": "f", "arguments": {"a": "\\"}{", "b": [1, {}]}}',
    '{"name": "get_weather", "parameters": {}}',
    '{"arguments": {"x": null}, "name": "f"}',
    '{"name": "f", "arguments": {"a": 1}, "id": "z"}',
    '{"name": "f", "argu',
    '{"a": 1}',
    '{"name": "other", "arguments": {}}',
    *("{", "}", '"', "\\", " ", "Hello", "ö€𝄞", "?", "x" * 40),
]


def texts(name: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(PARTS[name] + COMMON), max_size=9).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_random_answers_in_random_pieces(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    whole = read(name, [text])
    assert read(name, pieces) == whole
    assert read(name, list(text)) == whole


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_an_answer_without_markers_is_its_content(name: str, data: st.DataObject) -> None:
    text = "x" + data.draw(st.text(st.characters(exclude_characters="<[", codec="utf-8")))
    assert [event.text for event in read(name, list(text))] == [text]  # type: ignore[union-attr]


CALLS = {
    "hermes": 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call>"}}\n</tool_call>\n',
    "llama": '{"name": "f", "parameters": {"a": "}"}}; {"name": "get_weather", "parameters": {}}',
    "mistral": 'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"a": []}}, {"name": "get_weather", "arguments": {}}]',
    "harmony": "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
    ' <|constrain|>json<|message|>{"a": "<|"}<|call|>',
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_place_to_cut(name: str) -> None:
    text = CALLS[name]
    whole = read(name, [text])
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert read(name, [text[:first], text[first:second], text[second:]]) == whole


@pytest.mark.parametrize("name", PARSERS)
def test_what_was_told_stands(name: str) -> None:
    """An answer that ends anywhere has told only what the whole one tells as well, but for what may then be content."""
    text = CALLS[name]
    calls = [event for event in read(name, [text]) if hasattr(event, "call_id")]
    for length in range(len(text)):
        begun = [event for event in read(name, list(text[:length])) if hasattr(event, "call_id")]
        assert begun == calls[: len(begun)]
