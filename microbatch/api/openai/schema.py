"""The requests of the OpenAI API, field by field: what this server reads, and what it only knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024
MAX_TOOLS: Final = 128
MAX_METADATA: Final = 16

#: Known fields that are not implemented, with the values that ask for nothing and so are no reason to refuse.
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
}
UNSUPPORTED_COMPLETION: Final[Mapping[str, tuple[object, ...]]] = {**UNSUPPORTED, "suffix": ("",)}
UNSUPPORTED_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    **UNSUPPORTED,
    "audio": (),
    "chat_template": (),
    "documents": (),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

#: Of ``/tokenize``: a conversation is rendered as the chat endpoint does it.
UNSUPPORTED_TOKENIZE: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "tools": (),
}


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Only with ``stream``. Obfuscation is never done, so it can only be switched off."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What both endpoints share. Null is as good as absent; without ``model`` the served one answers. ``user`` to
    ``parallel_tool_calls`` change no answer."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None

    user: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class FunctionCall(Struct):
    """What an assistant wanted to call; ``arguments`` is JSON as text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """One call in an earlier message of the assistant."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One message of a conversation. The last six are what an assistant's message of this API carries besides."""

    role: str
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of ``POST /tokenize``: one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
