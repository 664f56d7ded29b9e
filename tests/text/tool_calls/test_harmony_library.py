"""The parser of gpt-oss answers against OpenAI's own, which reads tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.tool_calls.support import told

harmony = pytest.importorskip("openai_harmony", reason="oss-harmony is not installed")

CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ANSWERS = [
    "<|channel|>final<|message|>Hi there.<|return|>",
    "<|channel|>analysis<|message|>Think ö.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
    f'<|channel|>analysis<|message|>Look.<|end|><|start|>assistant{CALL}{{"a": 1}}<|call|>',
    f'{CALL}{{"a": 1}}<|end|><|start|>assistant{CALL}{{"b": 2}}<|call|>',
    ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
    "<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
]


@pytest.fixture(scope="module")
def encoding() -> Any:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.mark.parametrize("text", ANSWERS)
def test_as_the_library_reads_it(encoding: Any, text: str) -> None:
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for token_id in encoding.encode(text, allowed_special="all"):
        parser.process(token_id)
    parser.process_eos()
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for message in parser.messages:
        written = "".join(part.text for part in message.content)
        if message.recipient and message.recipient.startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), written))
        elif message.channel == "final":
            content += written
        else:
            reasoning += written
    assert told("harmony", text) == (content, calls, reasoning)
