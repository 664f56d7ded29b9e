"""What a running engine is made of."""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.core.ports import Forms, Tokenizer
from microbatch.engine.loop import EngineLoop


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a running engine is made of. ``max_model_len`` bounds prompt and output together; times in seconds.

    ``forms``: what holds answers to a form, where the executor can do that. ``shares_prefixes``: whether the executor
    can begin behind cached K/V; if not, a system prompt is not pinned.
    """

    loop: EngineLoop
    tokenizer: Tokenizer
    model_name: str
    max_model_len: int
    forms: Forms | None = None
    system_prompt: str | None = None
    shares_prefixes: bool = True
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None
    #: Tells clients of one served model and its precision from those of another.
    fingerprint: str = ""
