"""microbatch: dynamic batching for language models, as a server and as a library.

    from microbatch import Engine, SamplingParams

    async with Engine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
        out = await engine.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))

The names in ``__all__`` are the public ones; everything else may move. Importing the package loads none of them (and so
no torch): each is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microbatch.api.app import create_app
    from microbatch.core.request import FinishReason, SamplingParams
    from microbatch.engine.outputs import RequestOutput
    from microbatch.errors import MicrobatchError
    from microbatch.llm import LLM
    from microbatch.wiring import Engine

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "FinishReason",
    "LLM",
    "MicrobatchError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "create_app",
]

_HOMES = {
    "Engine": "microbatch.wiring",
    "FinishReason": "microbatch.core.request",
    "LLM": "microbatch.llm",
    "MicrobatchError": "microbatch.errors",
    "RequestOutput": "microbatch.engine.outputs",
    "SamplingParams": "microbatch.core.request",
    "create_app": "microbatch.api.app",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
