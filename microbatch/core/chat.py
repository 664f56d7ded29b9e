"""How a conversation is to be rendered, besides its messages, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """``tools`` in the form of the OpenAI API. ``continue_final_message``: the last message is left open and the answer
    goes on with it. ``variables`` are the client's own for the template; ``answer_prefix`` is put behind the prompt."""

    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    answer_prefix: str = ""
