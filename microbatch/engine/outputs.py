"""What a caller of the engine gets: pieces of text while it runs, the whole answer at the end."""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.core.plan import TokenLogprobs
from microbatch.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text of one choice. ``token_ids`` are the shown tokens since the last delta of this choice, with
    ``logprobs`` beside them when asked for; ``finish_reason`` is set on the last delta of the choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. The prompt counts once; ``completion_tokens`` counts every generated token of every choice,
    the end token included; ``cached_tokens`` are the prompt tokens whose K/V was reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the arrival: ``queue`` to the first scheduling, ``ttft`` to the first token, ``e2e`` to the end.
    None for what never happened."""

    queue: float | None
    ttft: float | None
    e2e: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole answer to a request; ``text``, ``token_ids`` and ``finish_reason`` are those of the first choice.
    ``prompt_logprobs``, if asked for, are those of the prompt's tokens from the second on."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Shown tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason
