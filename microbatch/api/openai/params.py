"""From the fields of a request to ``SamplingParams``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from microbatch.api.errors import quote
from microbatch.api.openai.best_of import check_best_of
from microbatch.api.openai.formats import read_format
from microbatch.api.openai.schema import ChatRequest, CompletionRequest, SamplingFields
from microbatch.core.request import MAX_LOGIT_BIAS, SamplingParams
from microbatch.errors import InvalidRequestError, UnsupportedError

DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_CHAT_LOGPROBS: Final = 20

#: Fields that go into ``SamplingParams`` as they are.
_PLAIN: Final = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
)
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,18}")


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Parameters of a completions request: 16 tokens unless it says otherwise."""
    _check_stream_options(body)
    _check_range("logprobs", body.logprobs, MAX_COMPLETION_LOGPROBS)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if not body.echo and body.prompt_logprobs is None:  # or else the prompt is what is asked about
        _check_max_tokens(max_tokens)
    params = _params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    check_best_of(body.best_of, params.n, stream=bool(body.stream))
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
    return params


def chat_params(body: ChatRequest) -> SamplingParams:
    """Parameters of a chat request: up to the end of the context unless it says otherwise."""
    _check_stream_options(body)
    _check_range("top_logprobs", body.top_logprobs, MAX_CHAT_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_max_tokens(body.max_tokens)
    _check_max_tokens(body.max_completion_tokens, "max_completion_tokens")
    if body.max_completion_tokens is None:
        return _params(body, max_tokens=body.max_tokens, logprobs=logprobs)
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    try:
        return _params(body, max_tokens=body.max_completion_tokens, logprobs=logprobs)
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        name = "max_completion_tokens"
        raise InvalidRequestError(error.message.replace("max_tokens", name, 1), param=name) from error


def _params(body: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs come only without stream", param="prompt_logprobs")
    given: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        structured_output=read_format(body),
        **given,
    )


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias")
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):  # "07" and "7" would be two values for one token
            raise InvalidRequestError(f"logit_bias: the key {quote(key)} is not a token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    if body.stream_options.include_obfuscation:
        raise UnsupportedError("include_obfuscation is not supported by this server", param="stream_options")


def _check_max_tokens(max_tokens: int | None, name: str = "max_tokens") -> None:
    if max_tokens == 0:
        raise InvalidRequestError(f"{name} must be at least 1, got 0", param=name)


def _check_range(name: str, value: int | None, high: int) -> None:
    if value is not None and not 0 <= value <= high:
        raise InvalidRequestError(f"{name} must be from 0 to {high}, got {value}", param=name)
