"""Which form of tool calls a model writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from microbatch.text.tool_calls.harmony import HarmonyParser
from microbatch.text.tool_calls.hermes import HermesParser
from microbatch.text.tool_calls.llama import LlamaParser
from microbatch.text.tool_calls.mistral import MistralParser
from microbatch.text.tool_calls.parser import ToolParser

NONE: Final = "none"
#: By the name in ``--tool-parser``.
PARSERS: Final[Mapping[str, type[ToolParser]]] = {
    "hermes": HermesParser,
    "llama": LlamaParser,
    "mistral": MistralParser,
    "harmony": HarmonyParser,
}
#: What a template says to or of its model, the most telling first.
_SIGNS: Final = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", NONE),  # forms like XML within the markers of Hermes
    ("<arg_key>", NONE),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
)


def choose_parser(template: str | None) -> str:
    """The name of the parser for a model with this chat template; "none" when its form is not known.

    A template that has no place for tools gets them in the system prompt (``preamble``), in the form of Hermes.
    """
    template = template or ""
    if "tools" not in template:
        return "harmony" if "<|channel|>" in template else "hermes"
    return next((name for sign, name in _SIGNS if sign in template), NONE)
