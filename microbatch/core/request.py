"""What a client asks for: the request and its sampling parameters, as values."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from microbatch.core.structured import StructuredOutput
from microbatch.errors import InvalidRequestError

#: At or below this temperature sampling is greedy: dividing logits by less overflows and changes nothing.
GREEDY_TEMPERATURE: Final = 1e-4
MAX_TEMPERATURE: Final = 2.0
MAX_N: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024


class FinishReason(enum.Enum):
    """Why a sequence ended; every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to end. Immutable; raises ``InvalidRequestError`` with ``param`` set.

    ``max_tokens`` None means up to the end of the context. ``top_k`` 0 or -1 is off. ``logit_bias`` maps a token id to
    a value in [-100, 100] that is added to its logit. ``seed`` None draws a fresh seed. ``logprobs`` None is off, k
    asks for the chosen token's log-probability and the k best alternatives; ``prompt_logprobs`` does so for the tokens
    of the prompt. ``max_tokens`` 0 generates nothing. ``stop`` texts are cut from the answer, the token that ends it
    (end of sequence, ``stop_token_ids``) is not shown; ``shown_tokens`` names the special tokens that are.
    ``min_tokens`` holds back the end
    tokens. ``structured_output`` keeps the answer to a form.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured_output: StructuredOutput | None = None
    shown_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _made("stop", stop, tuple))
        object.__setattr__(self, "stop_token_ids", _made("stop_token_ids", self.stop_token_ids, tuple))
        object.__setattr__(self, "logit_bias", _made("logit_bias", self.logit_bias, dict))
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_logit_bias()
        self._check_structured_output()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    def _check_numbers(self) -> None:
        _in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0:
            raise InvalidRequestError(
                "repetition_penalty must be above 0, 1 means no penalty", param="repetition_penalty"
            )
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, None)
        _whole("top_k", self.top_k, -1, None)
        _whole("n", self.n, 1, MAX_N)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOPS} texts, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop texts must not be empty", param="stop")
            if len(text) > MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"a stop text has at most {MAX_STOP_CHARS} characters, got {len(text)}", param="stop"
                )
        if len(self.stop_token_ids) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"stop_token_ids takes at most {MAX_LOGIT_BIAS} ids", param="stop_token_ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, None)

    def _check_structured_output(self) -> None:
        """A form ends where it ends: what would hold the end back contradicts it."""
        if self.structured_output is None:
            return
        for name, given in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
            if given:
                raise InvalidRequestError(f"{name} cannot be combined with a structured output", param=name)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, None)
            _in_range("logit_bias", bias, -100.0, 100.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request. Times are seconds on the engine's monotonic clock.

    ``deadline`` ends the request whatever its state; ``queue_deadline`` only while nothing of it has been scheduled.
    ``cache_salt`` isolates its prefix-cache entries from clients with another salt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    deadline: float | None = None
    queue_deadline: float | None = None
    priority: int = 0
    client: str = ""
    cache_salt: str = ""


def _made(name: str, value: Any, make: Callable[[Any], Any]) -> Any:
    """``value`` as a container of its own; None means empty."""
    try:
        return make(value or ())
    except (TypeError, ValueError):
        raise InvalidRequestError(f"{name} must not be {type(value).__name__}", param=name) from None


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, got {type(value).__name__}", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be from {low:g} to {high:g}, got {value:g}", param=name)


def _whole(name: str, value: int, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, got {type(value).__name__}", param=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be {bounds}, got {value}", param=name)
