"""Each form of tool calls: whole answers, and what only looks like a call."""

from __future__ import annotations

import pytest

from microbatch.text.tool_calls.events import CallBegins
from tests.text.tool_calls.support import make, read, told

F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "get_weather", "arguments": {"city": "K\\u00f6ln \\"x\\" }{"}}'
F_CALL, G_CALL = ("f", '{"a": 1}'), ("get_weather", '{"city": "K\\u00f6ln \\"x\\" }{"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello", "Hello", []),
        (" Hello \n", " Hello \n", []),
        (f"<tool_call>\n{F}\n</tool_call>", "", [F_CALL]),
        (f"<tool_call>{F}", "", [F_CALL]),
        (f"I look.\n<tool_call>\n{F}\n</tool_call>\n", "I look.", [F_CALL]),
        (f"<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>", "", [F_CALL, G_CALL]),
        (f"<tool_call>{F}</tool_call>\nDone.", "\nDone.", [F_CALL]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F_CALL]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>', "", [F_CALL]),
        ('<tool_call>{"id": 7, "name": "f", "parameters": {"a": 1}}</tool_call>', "", [F_CALL]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F_CALL]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
        # what breaks off is told as far as it went
        ('<tool_call>{"name": "f", "arguments": {"a": "x\\', "", [("f", '{"a": "x\\')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Hm', " Hm", [("f", '{"a": 1')]),
        # what is no call is content, as it was written
        ("<tool_call", "<tool_call", []),
        ("a <tool_call> \n", "a <tool_call> \n", []),
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "a b"}</tool_call>', '<tool_call>{"name": "a b"}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": "5"}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": ?}</tool_call>', '<tool_call>{"name": ?}</tool_call>', []),
        ("1 < 2 <tool 3", "1 < 2 <tool 3", []),
        (f"<tool_call>oops <tool_call>{F}</tool_call>", "<tool_call>oops", [F_CALL]),
        (f"<tool_call>{F}</tool_call> <tool_call>oops", " <tool_call>oops", [F_CALL]),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told("hermes", text) == (content, calls, "")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello", "Hello", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [F_CALL]),
        ('\n{"name": "f", "parameters": {"a": 1}}\n', "", [F_CALL]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F_CALL]),
        (f"{F}; {G}", "", [F_CALL, G_CALL]),
        (f"{F}{G}", "", [F_CALL, G_CALL]),
        (f"<|python_tag|>{F}", "", [F_CALL]),
        (f"Let me see. <|python_tag|>{F};<|python_tag|>{G}", "Let me see.", [F_CALL, G_CALL]),
        ('<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
        ('{"name": "other", "parameters": {"a": 1}}', '{"name": "other", "parameters": {"a": 1}}', []),
        ('{"parameters": {"a": 1}, "name": "other"}', '{"parameters": {"a": 1}, "name": "other"}', []),
        ('{"answer": 42}', '{"answer": 42}', []),
        (f"See {F}", f"See {F}", []),
        (f"{F}; and so on", "; and so on", [F_CALL]),
        (f"{F}; ", ";", [F_CALL]),
        (f"{F} <|python", " <|python", [F_CALL]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("{", "{", []),
        ("  ", "  ", []),
    ],
)
def test_llama(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told("llama", text) == (content, calls, "")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello [x]", "Hello [x]", []),
        (f"[TOOL_CALLS] [{F}]", "", [F_CALL]),
        (f"[TOOL_CALLS][{F}, {G}]", "", [F_CALL, G_CALL]),
        (f"See. [TOOL_CALLS] [ {F} ] ", "See.", [F_CALL]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [F_CALL]),
        ('[TOOL_CALLS]f{"a": 1}', "", [F_CALL]),
        (
            'x[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
            "x",
            [F_CALL, G_CALL[:1] + ("{}",)],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": "\\', "", [("f", '{"a": "\\')]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALLS][", "[TOOL_CALLS][", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
        ("[TOOL_CALLS]not a call", "[TOOL_CALLS]not a call", []),
        ("[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
        (f"[TOOL_CALLS][{F}, 5]", ", 5]", [F_CALL]),
        (f"[TOOL_CALLS][{F}", "", [F_CALL]),
        (f"[TOOL_CALLS][{F}] Hm", " Hm", [F_CALL]),
    ],
)
def test_mistral(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told("mistral", text) == (content, calls, "")


def test_mistral_takes_the_models_own_id() -> None:
    events = read("mistral", ['[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}'])
    assert events[0] == CallBegins(0, "abc123XYZ", "f")


THOUGHT = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "content", "calls", "reasoning"),
    [
        ("<|channel|>final<|message|>Hi <|return|>", "Hi ", [], ""),
        (f"{THOUGHT}<|channel|>final<|message|>Hi", "Hi", [], "Think."),
        (f'{THOUGHT}{CALL}{{"a": 1}}<|call|>', "", [F_CALL], "Think."),
        (f'{CALL}{{"a": 1}}<|end|><|start|>assistant{CALL}{{}}', "", [F_CALL, ("f", "{}")], ""),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", [F_CALL], ""),
        (f"{CALL}<|call|>", "", [("f", "{}")], ""),
        (f"{CALL}", "", [("f", "{}")], ""),
        (f'{CALL}{{"a', "", [("f", '{"a')], ""),
        ("<|channel|>commentary<|message|>I look.<|end|>", "", [], "I look."),
        ("<|channel|>commentary to=functions.other<|message|>{}", "{}", [], ""),
        ("<|channel|>analysis to=browser<|message|>{}", "", [], "{}"),
        ("<|message|>Hi", "Hi", [], ""),
        ("Hello", "Hello", [], ""),
        ("Hello <|end", "Hello <|end", [], ""),
        ("", "", [], ""),
        ("<|chan", "<|chan", [], ""),
        ("<|channel|>ana", "", [], ""),
        (f"{THOUGHT}<|channel|>fin", "", [], "Think."),
        ("<|channel|>final<|message|>Hi<|end|>" + "x" * 600, "Hi" + "x" * 600, [], ""),
    ],
)
def test_harmony(text: str, content: str, calls: list[tuple[str, str]], reasoning: str) -> None:
    assert told("harmony", text) == (content, calls, reasoning)


def test_arguments_come_as_they_are_written() -> None:
    parser = make("hermes")
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert parser.push('ents": {"te')[0] == CallBegins(0, "c0", "f")
    assert [event.text for event in parser.push("xt")] == ["xt"]  # type: ignore[union-attr]


def test_text_that_is_no_call_does_not_wait() -> None:
    parser = make("llama")
    assert [event.text for event in parser.push('{"answer": ')] == ['{"answer":']  # type: ignore[union-attr]


def test_ids() -> None:
    ids = {type(make(name)).new_id() for name in ("hermes", "llama", "harmony") for _ in range(9)}
    assert len(ids) == 27 and all(i.startswith("call_") for i in ids)
    mistral = type(make("mistral")).new_id()
    assert len(mistral) == 9 and mistral.isalnum()
