"""The form of a model by its chat template."""

from __future__ import annotations

import pytest

from microbatch.text.tool_calls.choosing import choose_parser


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("{{ messages }}<|channel|>final", "harmony"),
        ("{{ tools }}<tool_call>\n", "hermes"),
        ("{{ tools }}<tool_call>\n<function=x>", "none"),
        ("{{ tools }}<tool_call>x<arg_key>", "none"),
        ("{{ tools }}<|python_tag|>", "llama"),
        ("{{ tools }}<|start_header_id|>", "llama"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|start|>assistant<|channel|>", "harmony"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "none"),
    ],
)
def test_by_template(template: str | None, name: str) -> None:
    assert choose_parser(template) == name
