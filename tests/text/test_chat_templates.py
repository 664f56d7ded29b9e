"""Conversations by templates with and without a place for tools, continued ones, and variables of the client."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.core.chat import ChatOptions
from microbatch.errors import InvalidRequestError, MicrobatchError, UnsupportedError
from microbatch.text.tokenizer import HFTokenizer
from tests.text.toy_tokenizers import CHATML, byte_level_backend, raw_tokenizer

USER: dict[str, object] = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %};{% endfor %}"
    "{% if think is defined %}{{ think }}{% endif %}{% if reasoning_effort %}effort={{ reasoning_effort }}{% endif %}"
)


def rendered(messages: list[dict[str, object]], template: Any = CHATML, parser: str = "auto", **options: Any) -> str:
    tokenizer = HFTokenizer(raw_tokenizer(byte_level_backend(), template), 512, {2}, None, parser)
    ids = tokenizer.apply_chat_template(messages, ChatOptions(**options))
    return b"".join(tokenizer.token_text(i)[1] for i in ids).decode()


CALLED: list[dict[str, object]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "4", "tool_call_id": "c"},
    {"role": "tool", "content": "5", "tool_call_id": "d"},
]
WRITTEN = (
    '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
)


def test_a_template_with_a_place_for_tools_gets_them() -> None:
    text = rendered(CALLED, WITH_TOOLS, tools=(TOOL,))
    assert text == "(f)user=Hi;assistant=<tool_call>f;tool=4;tool=5;"


def test_without_a_place_tools_are_written_into_the_system_prompt() -> None:
    text = rendered(CALLED, tools=(TOOL,))
    begin, end = text.split("<|im_end|>\n", 1)
    assert begin.startswith("<|im_start|>system\nYou are a function calling AI model.")
    assert '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}\n</tools>' in begin
    assert end == f"<|im_start|>user\nHi<|im_end|>\n{WRITTEN}<|im_start|>assistant\n"


def test_behind_the_system_prompt_of_the_request() -> None:
    text = rendered([{"role": "system", "content": "Be brief."}, USER], tools=(TOOL,))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou are a function calling AI model.")


def test_calls_and_results_are_written_out_without_tools_too() -> None:
    assert rendered(CALLED) == f"<|im_start|>user\nHi<|im_end|>\n{WRITTEN}<|im_start|>assistant\n"


def test_content_beside_calls_is_kept() -> None:
    text = rendered([USER, {**CALLED[1], "content": "I look."}])
    assert 'I look.\n<tool_call>\n{"name": "f"' in text


def test_another_form_is_not_written_out() -> None:
    with pytest.raises(UnsupportedError, match="no place for tools") as caught:
        rendered([USER], parser="llama", tools=(TOOL,))
    assert caught.value.param == "tools"


def test_a_template_of_its_own_for_tools() -> None:
    templates = {"default": CHATML, "tool_use": WITH_TOOLS}
    assert rendered([USER], templates, tools=(TOOL,)) == "(f)user=Hi;"
    assert rendered([USER], templates) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_prefix_of_the_answer() -> None:
    assert rendered([USER], answer_prefix="<tool_call>").endswith("<|im_start|>assistant\n<tool_call>")


@pytest.mark.parametrize("content", ["He ", "", "He\n"])
def test_a_continued_message_stays_open(content: str) -> None:
    messages: list[dict[str, object]] = [USER, {"role": "assistant", "content": content}]
    text = rendered(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_no_generation_prompt() -> None:
    assert rendered([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_variables_and_effort() -> None:
    text = rendered([USER], WITH_TOOLS, variables={"think": "hm", "other": 5}, reasoning_effort="low")
    assert text == "user=Hi;hmeffort=low"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "chat_template", "tokenize", "eos_token", "self"])
def test_what_is_not_the_clients_to_set(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rendered([USER], variables={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_effort_that_the_template_does_not_know() -> None:
    with pytest.raises(UnsupportedError) as caught:
        rendered([USER], reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("template", [None, {"other": CHATML}])
def test_no_template(template: Any) -> None:
    with pytest.raises(MicrobatchError, match="--chat-template"):
        rendered([USER], template, tools=(TOOL,))
